"""Getting the arena over a Unix socket, from a server that speaks the frames of `rust/ipc` in Python."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_caches import allocate, block_content, fill, full, group, plan
from undercroft._core import Arena, Copier, UndercroftError
from undercroft.connector.metadata import GroupCopy, TransferJob, UndercroftMetadata
from undercroft.connector.worker.worker import WorkerConnector

SIZE = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
FRAMES = Path(__file__).parents[2] / "rust/ipc/src/frame.rs"
VERSION = int(re.search(r"pub const VERSION: u16 = (\d+);", FRAMES.read_text())[1])  # type: ignore[index]
"""Version of the protocol."""

REQUEST = struct.pack("<4sHBBI16x", b"UCFT", VERSION, 1, 0, 16)


class Server:
    """Hands out one memfd. ``answer`` replaces the frame it answers with."""

    def __init__(self, path: Path, arena_id: int, answer: bytes | None = None, seals: int = SEALS) -> None:
        self.path = str(path)
        self.fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self.fd, SIZE)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.bytes = mmap.mmap(self.fd, SIZE)
        self.answer = answer or struct.pack("<4sHBBIQQ", b"UCFT", VERSION, 2, 0, 16, SIZE, arena_id)
        self.connections: list[socket.socket] = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            if connection.recv(len(REQUEST), socket.MSG_WAITALL) != REQUEST:
                connection.close()
                return
            self.connections.append(connection)
            socket.send_fds(connection, [self.answer], [self.fd])

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.path)
        self.thread.join()
        for one in [*self.connections, self.listener]:
            one.close()
        self.bytes.close()
        os.close(self.fd)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def start(*args: Any, **kwargs: Any) -> Server:
        servers.append(Server(tmp_path / f"{len(servers)}.sock", *args, **kwargs))
        return servers[-1]

    yield start
    for one in servers:
        one.close()


def test_the_arena_is_the_servers_memory(serve: Any) -> None:
    server = serve(7)
    arena = Arena.attach(server.path, 0)
    assert (arena.size, arena.arena_id) == (SIZE, 7)
    ctypes.memmove(arena.address + 100, b"written by the worker", 21)
    assert server.bytes[100:121] == b"written by the worker"


def test_a_worker_sees_that_the_engine_has_gone(serve: Any) -> None:
    server = serve(7)
    arena = Arena.attach(server.path, 0)
    assert arena.is_served
    server.connections.pop().close()
    assert not arena.is_served
    # The arena's memory stays mapped, and shared.
    ctypes.memmove(arena.address, b"still there", 11)
    assert server.bytes[:11] == b"still there"


def test_the_connection_lives_as_long_as_copies_may(serve: Any) -> None:
    server = serve(7)
    copier = Copier(Arena.attach(server.path, 0))
    (connection,) = server.connections
    connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.recv(1)
    del copier
    connection.setblocking(True)
    assert connection.recv(1) == b""


def test_a_worker_that_lets_go_says_so_once(serve: Any) -> None:
    server = serve(7)
    arena = Arena.attach(server.path, 0)
    (connection,) = server.connections
    for _ in range(2):
        arena.let_go()
    assert connection.recv(64) == struct.pack("<4sHBBI", b"UCFT", VERSION, 5, 0, 0)
    assert connection.recv(64) == b""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answer": b"HTTP/1.1 400 Bad Request....."}, "not an undercroft socket"),
        (
            {"answer": struct.pack("<4sHBBIQQ", b"UCFT", VERSION + 2, 2, 0, 16, SIZE, 1)},
            f"protocol version {VERSION + 2}",
        ),
        (
            {"answer": struct.pack("<4sHBBIQQ", b"UCFT", VERSION, 2, 0, 16, 2 * SIZE, 1)},
            "expected a memfd of 2097152 bytes",
        ),
        ({"seals": 0}, "sealed: false"),
    ],
    ids=["magic", "version", "size", "seals"],
)
def test_an_answer_without_a_valid_arena_is_refused(serve: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UndercroftError, match=message):
        Arena.attach(serve(1, **settings).path, 0)


def test_nobody_there_is_said_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(UndercroftError, match=r"gone\.sock"):
        Arena.attach(str(tmp_path / "gone.sock"), 0)


def test_two_ranks_fill_a_payload_over_the_socket(serve: Any) -> None:
    server = serve(3)
    config = plan("LBHNC", [group("full", 3, full())])
    payload = b""
    job = TransferJob(1, "r", 0, [GroupCopy(0, np.array([4]), np.array([8192]))])
    for rank in range(2):
        parallel = SimpleNamespace(rank=rank, tensor_parallel_size=2)
        model = SimpleNamespace(get_total_num_kv_heads=lambda: 3)
        vllm_config: Any = SimpleNamespace(parallel_config=parallel, model_config=model)
        worker = WorkerConnector(vllm_config, config)
        caches = allocate(config)
        fill(caches, seed=rank)
        worker.register_kv_caches(caches)
        worker.wait_for_save(UndercroftMetadata(server.path, 3, saves=[job]))
        worker.shutdown()
        answer = worker.build_connector_worker_meta()
        assert answer is not None
        assert (answer.saves_ended, answer.saves_failed) == ({1: 1}, set())
        payload += b"".join(block_content(config, caches, 0, 4))
    assert server.bytes[8192 : 8192 + len(payload)] == payload


def test_an_arena_of_another_arena_id_is_not_used(serve: Any) -> None:
    server = serve(3)
    config = plan("LBHNC", [group("full", 3, full())])
    vllm_config: Any = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1))
    worker = WorkerConnector(vllm_config, config)
    worker.register_kv_caches(allocate(config))
    job = TransferJob(1, "r", 0, [GroupCopy(0, np.array([4]), np.array([0]))])
    worker.start_load_kv(UndercroftMetadata(server.path, 4, loads=[job]))
    results = worker.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"r"}
