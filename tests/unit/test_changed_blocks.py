"""A process changes one byte of another's block in host memory, which every worker of the user has mapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_process import ServeProcess, run
from served_client import BLOCK, Peer, prompt, until
from undercroft import _core
from undercroft.errors import ServerError

BLOCKS = 8
CHANGED = 3


def peer(server: ServeProcess) -> Peer:
    found = Peer(_core.Engine({"server": f"unix://{server.socket}", "server_timeout_ms": 30_000}))
    until("up", found.is_up)
    return found


def failures(server: ServeProcess) -> int:
    return server.status()["stats"]["host_checksum_failures"]


def hit(of: Peer, hashes: list[bytes]) -> int:
    """Blocks that a lookup finds, nothing of which is loaded."""
    tokens = of.answer("look", hashes)
    of.call("finish_request", "look")
    return tokens // BLOCK


def change_one_byte(of: Peer, writer: Peer, hashes: list[bytes]) -> None:
    """``of`` knows where the block lies; ``writer``, another client's worker, writes there."""
    begun = of.begin_load("where", hashes, of.answer("where", hashes))
    assert begun is not None
    load, places = begun
    slot, block_hash = places[CHANGED]
    assert block_hash == hashes[CHANGED]
    of.call("end_transfer", load.transfer_id, True)
    of.call("finish_request", "where")
    writer.memory(writer.engine.arena.session)[slot + 100] ^= 1


@pytest.mark.parametrize("verify_host", ["false", "true"])
def test_a_block_that_changed_is_not_written_and_if_hits_are_verified_not_served(
    tmp_path: Path, verify_host: str
) -> None:
    disk = tmp_path / "disk"
    options = [
        "--disk-path", str(disk), "--disk-capacity", "64MiB", "--disk-admission", "second_touch",
        "--verify-host", verify_host,
    ]  # fmt: skip
    hashes = prompt("shared", BLOCKS)
    with ServeProcess(tmp_path / "s.sock", *options) as server:
        tenant, other = peer(server), peer(server)
        tenant.save(hashes)
        until("saved", lambda: server.status()["stats"]["saved_blocks"] == BLOCKS)
        if verify_host == "true":
            assert hit(other, hashes) == BLOCKS
            change_one_byte(tenant, other, hashes)
            assert hit(other, hashes) == CHANGED
        else:
            # What is known of it is known from its second use on, which has it written.
            change_one_byte(tenant, other, hashes)
            hit(other, hashes)
        until("found", lambda: failures(server) == 1)
        assert other.load(hashes) == CHANGED * BLOCK
        until("written", lambda: server.status()["stats"]["disk_blocks"] == CHANGED)
        assert server.stop() == 0
    verified = run("inspect", str(disk), "--verify")
    assert verified.returncode == 0, verified.stdout
    with ServeProcess(tmp_path / "s.sock", *options) as server:
        again = peer(server)
        assert again.load(hashes) == CHANGED * BLOCK
        assert server.status()["stats"]["checksum_failures"] == failures(server) == 0


def test_a_process_without_a_session_does_not_get_the_memory(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "s.sock") as server:
        peer(server)
        for token in (0, 1, 2**128 - 1):
            with pytest.raises(ServerError, match="without handing over"):
                _core.Arena.attach(str(server.socket), token)
        assert server.status()["server"]["workers"] == 0
