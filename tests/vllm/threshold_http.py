"""A real server for the tests of the hit threshold, and requests to it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from forked_server import ForkedServer
from real_engine import TRUSTING
from undercroft import _core
from undercroft.demo.server import Server

REASON = "cache_threshold"


class Client:
    """Requests to one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=64))

    def raw(
        self, body: dict[str, Any], path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        content = json.dumps({"model": "m", "temperature": 0, "ignore_eos": True} | body)
        return self.http.post(path, content=content, headers={"Content-Type": "application/json", **(headers or {})})

    def complete(
        self, ids: Any, tokens: int = 4, headers: dict[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        body = {"prompt": ids, "max_tokens": tokens, "return_token_ids": True} | fields
        response = self.raw(body, headers=headers)
        assert response.status_code == 200, response.text + self.server.log_tail()
        return response.json()

    def chat(self, text: str, tokens: int = 4, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        return self.raw(body | fields, "/v1/chat/completions")

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        text = self.raw(body | {"stream": True, "stream_options": {"include_usage": True}}, path).text
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the series of that name that have these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            series = re.match(rf"{re.escape(name)}(\{{.*\}})? (\S+)$", line)
            if series and all(f'{key}="{value}"' in (series[1] or "") for key, value in labels.items()):
                total += float(series[2])
        return total

    def reset(self, external: bool = True) -> None:
        """Empty the device's prefix cache and undercroft's; vLLM refuses it while any block is in use."""
        self.wait_until_idle()
        response = self.http.post("/reset_prefix_cache", params={"reset_external": str(external).lower()})
        assert response.json() == {"success": True}

    def wait_until_idle(self) -> None:
        """Until nothing runs, waits or holds blocks: saves may end a few steps after the last response."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        deadline = time.monotonic() + 60
        while any(left := [self.metric(name) for name in names]):
            assert time.monotonic() < deadline, f"{names} stay at {left}"
            time.sleep(0.1)

    def reset_device(self) -> None:
        """Empty the device's prefix cache only."""
        self.reset(external=False)


def the_choice(answer: dict[str, Any]) -> dict[str, Any]:
    [choice] = answer["choices"]
    return choice


def output(answer: str, stream: bool) -> tuple[str, str]:
    """Text and finish reason of a response."""
    lines = [line.removeprefix("data: ") for line in answer.split("\n") if line] if stream else [answer]
    text, reason = "", ""
    for line in lines:
        for choice in [] if line == "[DONE]" else json.loads(line)["choices"]:
            part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            text += part.get("content") or ""
            reason = choice["finish_reason"] or reason
    assert text
    return text, reason


def wait_until_on_disk(directory: Path, blocks: int) -> None:
    """Until so many blocks would survive the end of the directory's owner, which writes them behind."""
    deadline = time.monotonic() + 60
    while (found := sum(one["blocks"] for one in _core.inspect(str(directory))["namespaces"])) < blocks:
        assert time.monotonic() < deadline, f"{found} blocks are on disk, not {blocks}"
        time.sleep(0.1)


@contextmanager
def start_server(
    model: Path,
    log: Path,
    options: dict[str, Any],
    *arguments: str,
    connector: tuple[str, str | None] | None = None,
    start: type[Server] = ForkedServer,
) -> Iterator[Client]:
    """A server with undercroft and these options of it, or with another ``connector``: its class and its module.

    ``start``: `Server` for processes that import vLLM themselves, as spawned ones do.
    """
    options = {**TRUSTING, **options}
    transfer = {"kv_connector": "UndercroftConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    if connector is not None:
        transfer |= dict(zip(("kv_connector", "kv_connector_module_path"), connector, strict=True))
    command = ["--model", str(model), "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--enforce-eager", "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with start([*command, *arguments], environment, log) as server:
        server.wait_until_ready(lambda elapsed: None)
        client = Client(server)
        yield client
        client.http.close()
