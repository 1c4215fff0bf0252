"""What a core dump of a server with `key_file` would hold: neither the key nor a block, after saves and after loads."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from serve_process import ServeProcess
from served_client import Peer, prompt, until
from undercroft import _core

KERNEL = "[vvar]", "[vvar_vclock]", "[vsyscall]"
"""Names of the kernel's own pages, which are in no core dump."""
PROMPT = prompt("secret", 64)


def mappings(pid: int) -> Iterator[tuple[int, int, list[str]]]:
    """Range and flags of each mapping that can be read."""
    first = end = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split(" ", 2)
        if "-" in head[0] and not head[0].endswith(":"):
            first, end = (int(number, 16) for number in head[0].split("-"))
            readable = head[1].startswith("r") and not line.endswith(KERNEL)
        elif line.startswith("VmFlags:") and readable:
            yield first, end, line.split()[1:]


def dumped(pid: int, *sought: bytes) -> list[int]:
    """How often each text is in the memory that a core dump of the process has."""
    counts = [0] * len(sought)
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for first, end, flags in mappings(pid):
            if "dd" in flags:
                continue
            try:
                found = os.pread(memory.fileno(), end - first, first)
            except OSError:
                continue  # Such pages are in no core dump either.
            counts = [count + found.count(text) for count, text in zip(counts, sought, strict=True)]
    return counts


def saved_or_loaded(socket: Path, load: bool) -> int:
    """The tokens of the prompt that a client has loaded, or has saved."""
    peer = Peer(_core.Engine({"server": f"unix://{socket}", "server_timeout_ms": 5000}))
    try:
        until("a server", peer.is_up)
        if load:
            return peer.load(PROMPT)
        peer.save(PROMPT)
        return len(PROMPT) * 16
    finally:
        peer.close()


def test_neither_the_key_nor_a_block_is_where_a_core_dump_would_have_it(tmp_path: Path) -> None:
    key = secrets.token_bytes(32)
    key_file = tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_text(key.hex())
    remote = f"file://{tmp_path}/remote"
    # Two repetitions of a hash are bytes of its block; one is in the index.
    sought = (key, key.hex().encode(), *(block_hash * 2 for block_hash in PROMPT))

    def serve(disk: str, load: bool) -> None:
        arguments = ("--disk-path", str(tmp_path / disk), "--disk-capacity", "64MiB", "--key-file", str(key_file))
        socket = tmp_path / "s" / "serve.sock"
        with ServeProcess(socket, *arguments, "--remote", remote, "--remote-object", "1MiB") as server:
            assert saved_or_loaded(socket, load) == len(PROMPT) * 16
            if not load:
                names = "disk_write_bytes", "remote_put_bytes"
                until("writes", lambda: all(server.status()["stats"][name] >= 64 * 4096 for name in names))
            assert dumped(server.process.pid, *sought) == [0] * len(sought), (disk, load)
            # The search finds what is there: the name of the directory.
            assert dumped(server.process.pid, str(tmp_path / disk).encode())[0] > 0
            assert server.stop() == 0

    serve("disk", load=False)
    serve("disk", load=True)
    # Another host: all blocks come from the remote store.
    serve("other", load=True)
