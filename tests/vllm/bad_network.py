"""A Redis server of a test's own, and a proxy before it that freezes, slows, breaks or damages the network."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

PIECE = 64 << 10


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    """Its port. Skips the test where there is no redis-server."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not on PATH; on Debian and Ubuntu: apt install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [program, "--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert any("Ready to accept connections" in line for line in server.stdout)
        drain = threading.Thread(target=lambda: list(server.stdout or ()), daemon=True)
        drain.start()
        try:
            yield port
        finally:
            server.kill()


class Proxy:
    """Passes bytes to a port of this machine and back. Its threads end with their connections."""

    def __init__(self, upstream: int) -> None:
        self.bytes_per_s = 0.0
        """The rate of each connection; 0 is unlimited."""
        self.damages = False
        """Large answers have a wrong bit."""
        self._refuses = False
        self._open: list[socket.socket] = []
        self._upstream = upstream
        self._passes = threading.Event()
        self._passes.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Nothing comes any more, and nothing ends."""
        self._passes.clear()

    def kill(self) -> None:
        """All connections end, and so do new ones."""
        self._refuses = True
        for end in self._open:
            _shut(end)
        self._open.clear()

    def pass_on(self) -> None:
        """All is well again."""
        self.bytes_per_s = 0.0
        self.damages = self._refuses = False
        self._passes.set()

    def close(self) -> None:
        self._listener.close()
        self.pass_on()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._refuses:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._upstream))
                self._open += [client, server]
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                if self.bytes_per_s:
                    time.sleep(len(piece) / self.bytes_per_s)
                self._passes.wait()
                if self.damages and is_answer and len(piece) > PIECE // 4:
                    middle = len(piece) // 2
                    piece = piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
                sink.sendall(piece)
        _shut(sink)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
