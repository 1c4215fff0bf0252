"""A vLLM OpenAI server as a child process, and the few HTTP calls that the demonstration and the tests make to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercroft.cli.output import CommandError, say

MODULE = "vllm.entrypoints.openai.api_server"
START_TIMEOUT_S = 900
STOP_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 600
LOG_TAIL_LINES = 40
CACHED_METRIC = re.compile(r'^vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE)


class ServerError(CommandError):
    """The server did not start, answer or stop; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed response."""

    ttft_s: float
    """From sending the request to the first token."""
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int


class Server:
    """A running server; use it as a context manager, so that its processes end with it."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        arguments = ["--host", "127.0.0.1", "--port", str(port), *arguments]
        self.process = self._launch(arguments, {**os.environ, **environment})

    def _launch(self, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as sink:
            # A session of its own: an interrupt at the terminal reaches the server through `stop` alone.
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self, progress: Callable[[float], None]) -> float:
        """Seconds until the server answers; ``progress`` is called about once a second meanwhile."""
        start = time.monotonic()
        while True:
            elapsed = time.monotonic() - start
            if self.process.poll() is not None:
                raise ServerError(f"the server ended with status {self.process.returncode}{self.log_tail()}")
            if elapsed > START_TIMEOUT_S:
                raise ServerError(f"the server did not answer within {START_TIMEOUT_S} s{self.log_tail()}")
            try:
                self._open("/health", timeout=5).close()
            except OSError:
                progress(elapsed)
                time.sleep(1)
            else:
                return elapsed

    def stop(self) -> None:
        """End the server in an orderly way, so that the cache on disk is complete."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                say(f"the server did not stop within {STOP_TIMEOUT_S} s and is killed", file=sys.stderr)
        # Engine and workers are in the session of the server; normally they have gone before it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log_tail(self) -> str:
        """The end of the log, to follow a message."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"; the end of {self.log}:", *(f"  | {line}" for line in lines)])

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer of a POST."""
        with self._open(path, body or {}) as response:
            return json.load(response)

    def cached_by_source(self) -> dict[str, int]:
        """Cached prompt tokens since the start, by the tier that they came from."""
        with self._open("/metrics") as response:
            page = response.read().decode()
        return {source: int(float(value)) for source, value in CACHED_METRIC.findall(page)}

    def stream(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send a completion or chat request, and read its tokens as they come."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        start = time.perf_counter()
        first = None
        token_ids: list[int] = []
        usage: dict[str, Any] = {}
        with self._open(path, body) as response:
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    new = choice.get("token_ids") or []
                    if new and first is None:
                        first = time.perf_counter() - start
                    token_ids += new
        if first is None or not usage:
            raise ServerError(f"{path}: the response held no tokens{self.log_tail()}")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(first, token_ids, usage["prompt_tokens"], details.get("cached_tokens") or 0)

    def _open(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = REQUEST_TIMEOUT_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: HTTP {error.code}: {error.read().decode(errors='replace')}") from None


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in lines:
        name, _, data = line.strip().partition(b": ")
        if name == b"data" and data != b"[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise ServerError(f"the server answered {event['error']}")
            yield event
