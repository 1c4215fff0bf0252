"""The helper of Mooncake stores, over a client that stands for Mooncake's: `make test-remote` has the real one."""

import json
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from undercroft.mooncake_helper import next_batch

BYTES = 1 << 20
PYTHON = Path(__file__).resolve().parents[2] / "python"

CLIENT = '''
import ctypes, threading

class MooncakeDistributedStore:
    """Keeps objects in this process. Some keys fail in a way of their own."""
    objects = {}
    def setup(self, host, metadata, segment, memory, protocol, device, master):
        return 0 if protocol == "tcp" else -600
    def register_buffer(self, address, size): return 0
    def close(self): threading.Event().wait()
    def batch_is_exist(self, keys): return [-900 if "bad" in key else int(key in self.objects) for key in keys]
    def is_exist(self, key): return int(key in self.objects)
    def batch_put_from(self, keys, places, sizes):
        if "full" in keys[0]: return [-200]
        self.objects[keys[0]] = ctypes.string_at(places[0], sizes[0])
        return [0]
    batch_upsert_from = batch_put_from
    def get_size(self, key):
        if "odd" in key: raise RuntimeError("a word about sizes")
        return -900 if "bad" in key else -703 if "new" in key else len(self.objects.get(key, "")) or -704
    def get_into_ranges(self, places, keys, to, at, sizes):
        if "few" in keys[0][0]: return []
        return [[[self.get(*of)]] for of in zip(places, (key[0] for key in keys), (size[0][0] for size in sizes))]
    def get(self, place, key, size):
        if "hang" in key: threading.Event().wait()
        if "no master" in key: return -900
        if "raise" in key: raise RuntimeError("a word of the client")
        if "odd" in key: return -600
        if key not in self.objects: return -800 if "cut" in key else -704
        if size > len(self.objects[key]): return -600
        ctypes.memmove(place, self.objects[key], size)
        return size
    def batch_remove(self, keys, force): return [0 if self.objects.pop(key, None) and force else -704 for key in keys]
'''


@contextmanager
def helper(path, client=CLIENT, stderr=None, **settings):
    """A helper that has been given its settings; asks it, with the memory, and the process."""
    package = path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text(client)
    memory = os.memfd_create("buffer")
    os.ftruncate(memory, BYTES)
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as master, ours:
        command = [sys.executable, "-P", "-m", "undercroft.mooncake_helper"]
        environment = os.environ | {"PYTHONPATH": f"{path}:{PYTHON}"}
        with theirs:
            process = subprocess.Popen(command, stdin=theirs, stderr=stderr, env=environment)
        try:
            port = master.getsockname()[1]
            start = {"bytes": BYTES, "master": f"127.0.0.1:{port}", "metadata": "m", "segment": 0, "protocol": "tcp"}
            start |= {"device": "", "host": "", "admin": "127.0.0.1:1"} | settings
            socket.send_fds(ours, [json.dumps(start).encode() + b"\n"], [memory])
            ours.settimeout(60)
            answers = ours.makefile("rb")

            def ask(request=None):
                if request is not None:
                    ours.sendall(json.dumps(request).encode() + b"\n")
                return json.loads(answers.readline())

            yield ask, mmap.mmap(memory, BYTES), process, ours
        finally:
            process.kill()
            process.wait()
            os.close(memory)


def test_objects_pass_through_the_memory(tmp_path):
    with helper(tmp_path) as (ask, memory, _, _):
        assert ask() == {"id": 0}
        memory[:5] = b"bytes"
        put = {"id": 1, "op": "put", "key": "a", "at": 0, "bytes": 5, "if_absent": True}
        assert ask(put) == {"id": 1, "values": [1]}
        memory[:5] = b"other"
        assert ask(put) == {"id": 1, "values": [0]}
        assert ask({"id": 2, "op": "get", "key": "a", "at": 4096, "bytes": 5})["values"] == [5]
        assert memory[4096:4101] == b"bytes"
        assert ask(put | {"if_absent": False})["values"] == [1]
        short = ask({"id": 3, "op": "get", "key": "a", "at": 8192, "bytes": 4096})
        assert short == {"id": 3, "values": [5]}
        assert memory[8192:8197] == b"other"
        assert ask({"id": 4, "op": "exist", "keys": ["a", "b"]})["values"] == [1, 0]
        assert ask({"id": 5, "op": "sizes", "keys": ["a", "b"]})["values"] == [5, -1]
        assert ask({"id": 6, "op": "remove", "keys": ["a", "b"]}) == {"id": 6}
        assert ask({"id": 7, "op": "exist", "keys": ["a"]})["values"] == [0]


@pytest.mark.parametrize(
    ("request_", "kind", "settled"),
    [
        ({"op": "get", "key": "none", "at": 0, "bytes": 5}, "not_found", True),
        ({"op": "get", "key": "no master", "at": 0, "bytes": 5}, "unreachable", True),
        ({"op": "get", "key": "cut", "at": 0, "bytes": 5}, "unreachable", False),
        ({"op": "get", "key": "raise", "at": 0, "bytes": 5}, "unreachable", False),
        ({"op": "get", "key": "odd", "at": 0, "bytes": 5}, "unreachable", False),
        ({"op": "get", "key": "few", "at": 0, "bytes": 5}, "unreachable", False),
        ({"op": "put", "key": "full", "at": 0, "bytes": 5, "if_absent": True}, "full", True),
        ({"op": "exist", "keys": ["a", "bad"]}, "unreachable", True),
        ({"op": "sizes", "keys": ["a", "bad"]}, "unreachable", True),
        ({"op": "list", "prefix": ""}, "unreachable", False),
    ],
)
def test_failures_have_a_kind_and_words_and_say_whether_a_transfer_may_run(tmp_path, request_, kind, settled):
    with helper(tmp_path) as (ask, *_):
        ask()
        answer = ask(request_ | {"id": 9})
        assert (answer["id"], answer["error"], answer.get("settled", False)) == (9, kind, settled)
        assert answer["detail"]
        assert ask({"id": 10, "op": "exist", "keys": ["a"]})["values"] == [0]
        # The thread of each kind of operation still runs.
        assert ask({"id": 11, "op": "get", "key": "none", "at": 0, "bytes": 5})["error"] == "not_found"


def test_an_object_without_a_size_counts_as_missing(tmp_path):
    with helper(tmp_path) as (ask, *_):
        ask()
        assert ask({"id": 1, "op": "sizes", "keys": ["none", "new"]}) == {"id": 1, "values": [-1, -1]}


def test_an_unexpected_error_ends_the_process_with_its_reason(tmp_path):
    with helper(tmp_path, stderr=subprocess.PIPE) as (ask, _, process, connection):
        ask()
        connection.sendall(b'{"id": 1, "op": "unknown"}\n')
        assert process.stderr.read().decode().splitlines()[-1] == "KeyError: 'unknown'"
        assert process.wait(60) == 1


def test_a_read_that_hangs_keeps_no_probe_and_no_write_and_not_the_end(tmp_path):
    with helper(tmp_path) as (ask, _, process, connection):
        ask()
        hanging = {"id": 1, "op": "get", "key": "hang", "at": 0, "bytes": 5}
        connection.sendall(json.dumps(hanging).encode() + b"\n")
        assert ask({"id": 2, "op": "exist", "keys": ["a"]})["id"] == 2
        assert ask({"id": 3, "op": "put", "key": "a", "at": 0, "bytes": 5, "if_absent": True})["id"] == 3
        connection.shutdown(socket.SHUT_WR)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("client", "settings", "kind", "words"),
    [
        ("import no_such_module", {}, "no_wheel", "no_such_module"),
        ("raise ImportError('libibverbs.so.1: cannot open')", {}, "no_library", "libibverbs.so.1"),
        (CLIENT, {"protocol": "rdma"}, "no_setup", "-600"),
        (CLIENT, {"master": "127.0.0.1:1"}, "no_setup", "refused"),
    ],
)
def test_a_store_that_cannot_be_opened_is_reported_and_ends_the_process(tmp_path, client, settings, kind, words):
    with helper(tmp_path, client, **settings) as (ask, _, process, _):
        answer = ask()
        assert (answer["id"], answer["error"]) == (0, kind)
        assert words in answer["detail"]
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [([1 << 20] * 9, [8, 1]), ([16 << 20] * 5, [2, 2, 1]), ([64 << 20] * 2, [1, 1]), ([None] * 9, [8, 1])],
)
def test_large_objects_do_not_wait_for_many_others(sizes, counts):
    requests = queue.SimpleQueue()
    for size in sizes:
        requests.put({} if size is None else {"bytes": size})
    assert [len(next_batch(requests)) for _ in counts] == counts
    assert requests.empty()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:1/stolen\r\ncontent-length: 0\r\n\r\n", "307"),
        (b"HTTP/1.1 200 x\r\n\r\n" + b"name\n" * (4 << 20), "more than 16 MiB"),
    ],
    ids=("redirect", "endless"),
)
def test_a_list_that_is_a_redirect_or_has_no_end_is_an_error(tmp_path, answer, words):
    with socket.create_server(("127.0.0.1", 0)) as admin:

        def serve():
            client, _ = admin.accept()
            with client, suppress(OSError):
                client.recv(1 << 16)
                client.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with helper(tmp_path, admin=f"127.0.0.1:{admin.getsockname()[1]}") as (ask, _, _, _):
            assert ask() == {"id": 0}
            failed = ask({"id": 1, "op": "list", "prefix": ""})
            assert failed["error"] == "unreachable"
            assert words in failed["detail"]
