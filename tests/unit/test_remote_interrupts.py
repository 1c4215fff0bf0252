"""Ctrl-C in the commands of a remote store, while the store does not answer or has very many objects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

URL = "s3://bucket/prefix"
SPACE = "0123456789abcdef" * 2
DATE = "Wed, 01 Jan 2020 00:00:00 GMT"


@contextmanager
def command(arguments: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "undercroft.cli.main", *arguments]
    credentials = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "r"}
    env = {**os.environ, **credentials, **environment}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def until_reader(fifo: Path, process: subprocess.Popen[str]) -> int:
    """Waits until the process has the FIFO open, and keeps it waiting for the FIFO's bytes."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "interrupts"),
    [
        (["inspect", URL], 1),
        (["doctor", "--role", "serve", "--json", "--remote", URL], 1),
        (["remote", "gc", URL, "--max-age", "1d", "--yes"], 2),
        (["bench", "remote", URL], 2),
    ],
)
def test_an_interrupt_ends_the_opening_of_a_store_that_hangs(
    arguments: list[str], interrupts: int, tmp_path: Path
) -> None:
    if arguments[0] == "bench":
        pytest.importorskip("undercroft_bench")
    # Like a file on a mount that hangs.
    fifo = tmp_path / "config"
    os.mkfifo(fifo)
    with command(arguments, {"AWS_CONFIG_FILE": str(fifo)}) as process:
        writer = until_reader(fifo, process)
        try:
            for last in range(interrupts):
                process.send_signal(signal.SIGINT)
                if last + 1 < interrupts:
                    # The first asks the work to end, and the second does not wait for it.
                    with pytest.raises(subprocess.TimeoutExpired):
                        process.wait(1)
            assert process.wait(5) == 130
        finally:
            os.close(writer)


class Store(BaseHTTPRequestHandler):
    """A bucket with more objects than can ever be listed."""

    protocol_version = "HTTP/1.1"
    pages = 0
    removals: ClassVar[list[str]] = []
    several = threading.Event()

    def answer(self, status: int, body: str = "", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.send_header("etag", '"0"')
        self.send_header("last-modified", DATE)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    def text(self) -> str:
        return self.rfile.read(int(self.headers.get("content-length", 0))).decode()

    def do_PUT(self) -> None:
        self.text()
        self.answer(200)

    def do_HEAD(self) -> None:
        self.answer(200, length=5)

    def do_DELETE(self) -> None:
        self.removals.append(self.path)
        self.answer(204)

    def do_POST(self) -> None:
        self.removals.append(self.text())
        self.answer(200, "<DeleteResult><Deleted><Key>sample</Key></Deleted></DeleteResult>")

    def do_GET(self) -> None:
        Store.pages += 1
        if Store.pages > 3:
            self.several.set()
        key = f"prefix/1/{SPACE}/00/00{Store.pages:062x}-8"
        item = f"<Key>{key}</Key><LastModified>2020-01-01T00:00:00.000Z</LastModified><ETag>0</ETag><Size>5</Size>"
        more = f"<NextContinuationToken>{Store.pages}</NextContinuationToken>"
        self.answer(200, f"<ListBucketResult><Contents>{item}</Contents>{more}</ListBucketResult>")

    def log_message(self, *_: object) -> None:
        pass


def test_an_interrupt_of_gc_during_the_list_removes_nothing(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    none = str(tmp_path / "none")
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_CONFIG_FILE": none,
        "AWS_SHARED_CREDENTIALS_FILE": none,
    }
    with command(["remote", "gc", URL, "--max-bytes", "1KiB", "--yes"], environment) as process:
        try:
            assert Store.several.wait(60), process.poll()
            process.send_signal(signal.SIGINT)
            assert process.wait(8) == 130
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            server.shutdown()
            server.server_close()
    # The sample for the store's clock is removed; no object is.
    assert not [removal for removal in Store.removals if SPACE in removal], Store.removals
