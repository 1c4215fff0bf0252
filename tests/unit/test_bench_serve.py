"""`undercroft bench serve` against a stand-in for a vLLM server: its requests, and its result from the answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from undercroft.cli import main

COLD_S, WARM_S, DEVICE_S = 0.06, 0.02, 0.002


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
        self.prompts: list[str] = []

    def complete(self, prompt: str) -> tuple[float, int]:
        """Seconds to the first token, and tokens cached."""
        self.prompts.append(prompt)
        tokens = len(prompt.split())
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
                self.reply({"data": [{"id": "the-model"}]})
            elif self.path == "/metrics":
                sizes = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
                self.reply(sizes if fake.says_sizes else "\n")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return
            if self.path == "/tokenize":
                self.reply({"count": len(body["prompt"].split())})
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
            time.sleep(seconds)
            usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"].split())}
            if fake.says_cached:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            events = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}]
            self.reply("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    return Handler


@pytest.fixture
def server() -> Iterator[tuple[FakeVllm, str]]:
    fake = FakeVllm()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(fake)) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield fake, f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def bench(capsys: pytest.CaptureFixture[str], url: str, *argv: str) -> dict[str, Any]:
    size = ["--prompts", "4", "--prompt-tokens", "200"]
    assert main.main(["bench", "serve", "--url", url, *size, "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("has_reset", [True, False])
def test_cold_and_warm_are_told_apart(
    has_reset: bool, server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    fake.has_reset = has_reset
    found = bench(capsys, url)
    cases = {case["case"]: case for case in found["cases"]}
    assert cases["cold"]["ttft_p50_ms"] >= COLD_S * 1e3 > cases["warm"]["ttft_p50_ms"] >= WARM_S * 1e3
    assert cases["warm"]["ttft_p50_ms"] > cases["device"]["ttft_p50_ms"]
    assert found["speedup"] > 1.2
    assert (cases["cold"]["cached_percent"], cases["device"]["cached_percent"]) == (0, 100)
    assert 99 < cases["warm"]["cached_percent"] < 100
    assert found["prompt_tokens"] == pytest.approx(200, abs=4)
    if has_reset:
        assert (found["device_cache"], found["fill_tokens"]) == ("emptied", None)
        assert len(fake.prompts) == 1 + 4 + 1 + 4
    else:
        assert found["device_cache"] == "displaced by other prompts"
        assert 1600 <= found["fill_tokens"] < 1900
    # No prompt is that of an earlier run.
    bench(capsys, url)
    assert len(set(fake.prompts)) >= 2 * 5


def test_what_is_not_said_is_asked_for_or_left_out(
    server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    fake.has_reset = fake.says_sizes = fake.says_cached = False
    arguments = ["bench", "serve", "--url", url, "--prompts", "4", "--prompt-tokens", "200"]
    assert main.main(arguments) == 1
    assert "give --fill-tokens" in capsys.readouterr().err
    found = bench(capsys, url, "--fill-tokens", "1600")
    assert {case["cached_percent"] for case in found["cases"]} == {None}


def test_text_has_a_bar_for_each_case(server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]) -> None:
    _, url = server
    assert main.main(["bench", "serve", "--url", url, "--prompts", "2", "--prompt-tokens", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["cold", "device", "warm"]
    bars = [line.count("#") for line in lines[:3]]
    assert bars[0] > bars[2] > bars[1] > 0


def test_a_server_that_refuses_or_is_not_there_is_one_line(
    server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = server
    fake.key = "secret"
    assert main.main(["bench", "serve", "--url", url]) == 1
    assert "HTTP 401" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert main.main(["bench", "serve", "--url", f"{url}/v1/", "--prompts", "1", "--prompt-tokens", "50"]) == 0
    capsys.readouterr()
    assert main.main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "does not answer" in error
    assert error.count("\n") == 1
