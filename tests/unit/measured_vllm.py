"""A stand-in for a vLLM server. Its times to the first token say how much it had cached, by a clock of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from undercroft.cli import main

COLD_S, WARM_S, DEVICE_S = 0.06, 0.02, 0.002


def count_tokens(prompt: str | list[int]) -> int:
    return len(prompt.split() if isinstance(prompt, str) else prompt)


class FakeVllm:
    """Caches prompts by their text: on the device until they are displaced or it is emptied, and in a cache below."""

    def __init__(self) -> None:
        self.device: list[str] = []
        self.below: set[str] = set()
        self.has_reset = True
        self.refused_resets = 1
        self.says_sizes = True
        self.says_cached = True
        self.key: str | None = None
        self.clock_s = 0.0
        self.max_model_len: int | None = None
        self.prompts: list[Any] = []

    def complete(self, prompt: Any) -> tuple[float, int]:
        """Seconds to the first token, and tokens cached."""
        self.prompts.append(prompt)
        tokens = count_tokens(prompt)
        if prompt in self.device:
            return DEVICE_S, tokens
        found = prompt in self.below
        self.below.add(prompt)
        # It holds 1,600 tokens.
        self.device = [*self.device, prompt][-(1600 // tokens) :]
        return (WARM_S, tokens - 1) if found else (COLD_S, 0)


def handler(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def reply(self, body: object, code: int = 200) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def allowed(self) -> bool:
            if fake.key is None or self.headers["Authorization"] == f"Bearer {fake.key}":
                return True
            self.reply({"error": "Unauthorized"}, 401)
            return False

        def do_GET(self) -> None:
            if not self.allowed():
                return
            if self.path == "/v1/models":
                self.reply({"data": [{"id": "the-model", "max_model_len": fake.max_model_len}]})
            elif self.path == "/metrics":
                sizes = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
                self.reply(sizes if fake.says_sizes else "\n")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return
            if self.path == "/tokenize":
                count = len(body["prompt"].split())
                self.reply({"count": count, "tokens": list(range(count))})
            elif self.path == "/reset_prefix_cache":
                if not fake.has_reset:
                    self.reply({}, 404)
                    return
                fake.refused_resets -= 1
                if fake.refused_resets < 0:
                    fake.device.clear()
                self.reply({"success": fake.refused_resets < 0})
            else:
                assert (self.path, body["model"]) == ("/v1/completions", "the-model")
                self.stream(body)

        def stream(self, body: dict[str, Any]) -> None:
            seconds, cached = fake.complete(body["prompt"])
            fake.clock_s += seconds
            usage: dict[str, Any] = {"prompt_tokens": count_tokens(body["prompt"])}
            if fake.says_cached:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            events = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}]
            self.reply("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    return Handler


@contextmanager
def listening(fake: FakeVllm) -> Iterator[str]:
    """Serve on a free port, with its clock in place of the client's; the URL."""
    clock = SimpleNamespace(perf_counter=lambda: fake.clock_s, monotonic=time.monotonic, sleep=time.sleep)
    with (
        mock.patch("undercroft_bench.vllm_client.time", clock),
        ThreadingHTTPServer(("127.0.0.1", 0), handler(fake)) as http,
    ):
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def server_of(make: Callable[[], FakeVllm]) -> Any:
    """A fixture: a stand-in, and the URL where it listens."""

    @pytest.fixture
    def server() -> Iterator[tuple[FakeVllm, str]]:
        fake = make()
        with listening(fake) as url:
            yield fake, url

    return server


def bench(capsys: pytest.CaptureFixture[str], url: str, *argv: str) -> dict[str, Any]:
    """The result of `undercroft bench serve`."""
    assert main.main(["bench", "serve", "--url", url, "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
