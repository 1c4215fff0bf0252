"""Dynamo's KV indexer, a router's index from elsewhere, fed by the ZMQ publishers of two vLLM servers with undercroft.

`make test-router` installs the indexer in an environment of its own and sets DYNAMO_PYTHON to its Python.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_checks import BLOCK
from real_engine import prompt
from threshold_http import Client, start_server

PYTHON = os.environ.get("DYNAMO_PYTHON", "")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not PYTHON, reason="needs DYNAMO_PYTHON, see `make test-router`")]

DEVICE_BLOCKS = 24
CHAT = prompt(6 * BLOCK + 1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Indexer:
    """Dynamo's standalone indexer, which follows publishers by itself."""

    def __init__(self, endpoints: list[str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        workers = ",".join(f"{number}={endpoint}" for number, endpoint in enumerate(endpoints, 1))
        arguments = ["--block-size", str(BLOCK), "--port", str(port), "--workers", workers]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "dynamo.indexer", *arguments], stdout=out, stderr=subprocess.STDOUT
            )
        self.log = log

    def blocks(self, ids: list[int]) -> dict[int, int]:
        """The first blocks of a prompt that each worker has in any tier, by the indexer."""
        found = httpx.post(f"{self.url}/query", json={"token_ids": ids, "model_name": "default"}).json()
        return {int(worker): tiers["longest_matched"] // BLOCK for worker, tiers in found["instances"].items()}

    def until(self, ids: list[int], expected: dict[int, int]) -> None:
        deadline = time.monotonic() + 60
        found: Any = None
        while found != expected:
            assert time.monotonic() < deadline, f"{found}, not {expected}: {self.log.read_text()[-2000:]}"
            time.sleep(0.1)
            try:
                found = self.blocks(ids)
            except httpx.TransportError as error:
                found = error

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def servers(model: Path, tmp_path: Path, options: dict[str, Any]) -> Iterator[tuple[list[Client], Indexer]]:
    """Two servers, and the indexer that follows both."""
    with ExitStack() as stack:
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        indexer = Indexer(endpoints, tmp_path / "indexer.log")
        stack.callback(indexer.close)
        clients = []
        for number, endpoint in enumerate(endpoints):
            events = {"enable_kv_cache_events": True, "endpoint": endpoint.replace("127.0.0.1", "*")}
            clients.append(
                stack.enter_context(
                    start_server(
                        model,
                        tmp_path / f"server{number}.log",
                        options,
                        "--kv-events-config",
                        json.dumps(events),
                        "--num-gpu-blocks-override",
                        str(DEVICE_BLOCKS),
                    )
                )
            )
        # A subscriber hears of nothing that was published before it was there.
        time.sleep(1)
        yield clients, indexer


def test_the_indexer_routes_to_host_memory_after_the_device_has_evicted(
    llama_with_tokenizer: Path, tmp_path: Path
) -> None:
    with servers(llama_with_tokenizer, tmp_path, {"host_memory": "256MiB", "min_load_tokens": 1}) as (clients, indexer):
        clients[0].complete(CHAT, 1)
        clients[0].wait_until_idle()
        clients[0].complete(prompt(BLOCK, seed=60), 1)
        indexer.until(CHAT, {1: 6})
        for seed in range(70, 76):
            clients[0].complete(prompt(7 * BLOCK + 1, seed=seed), 1)
        # vLLM alone would have told the indexer to forget the chat.
        clients[0].wait_until_idle()
        clients[0].complete(prompt(BLOCK, seed=61), 1)
        indexer.until(CHAT, {1: 6})
        scores = indexer.blocks(CHAT)
        best = max(scores, key=lambda worker: scores[worker])
        answer = clients[best - 1].complete(CHAT, 1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK
        # A reset of the device alone voids all for the indexer; undercroft tells its tiers again.
        clients[0].reset_device()
        indexer.until(CHAT, {1: 6})
        clients[0].reset()
        clients[0].complete(prompt(BLOCK, seed=62), 1)
        indexer.until(CHAT, {})
