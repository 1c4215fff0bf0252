"""A server that answers over HTTP as vLLM does, for commands that talk to one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class HttpVllm:
    """The requests that a server got. ``answer`` gives status and body of each POST.

    With an ``api_key``, the server refuses requests without that key."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]], api_key: str = "") -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.api_key = api_key
        self.answer = answer


@contextmanager
def serving(known: HttpVllm) -> Iterator[str]:
    """Serve on a free port; the URL."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if known.api_key and self.headers["Authorization"] != f"Bearer {known.api_key}":
                self._send(401, {"error": "Unauthorized"})
                return
            known.asked.append((self.path, body))
            self._send(*known.answer(body))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
