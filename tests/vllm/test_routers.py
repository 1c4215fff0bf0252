"""Routers from elsewhere between two vLLM servers with undercroft, which know the servers' caches from ZMQ alone.

`make test-router` installs the routers in an environment of their own and sets ROUTER_PYTHON to its Python.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_checks import BLOCK
from real_engine import prompt
from threshold_http import Client, start_server

PYTHON = os.environ.get("ROUTER_PYTHON", "")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not PYTHON, reason="needs ROUTER_PYTHON, see `make test-router`")]

DEVICE_BLOCKS = 24
PATIENCE_S = 60


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Node:
    """One server, and where it publishes its events."""

    client: Client
    endpoint: str

    def fill(self, first_seed: int) -> None:
        """Other prompts take all of the device's cache, and the last change of the tiers is published."""
        for seed in range(first_seed, first_seed + 6):
            self.client.complete(prompt(7 * BLOCK + 1, seed=seed), 1)
        self.publish(first_seed + 6)

    def publish(self, seed: int) -> None:
        """The changes up to now are published with a step."""
        self.client.wait_until_idle()
        self.client.complete(prompt(BLOCK, seed=seed), 1)


@pytest.fixture(scope="module")
def nodes(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Two servers, each with undercroft."""
    logs = tmp_path_factory.mktemp("routers")
    found = []
    with ExitStack() as stack:
        for number in range(2):
            port = free_port()
            events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
            arguments = ["--kv-events-config", json.dumps(events), "--num-gpu-blocks-override", str(DEVICE_BLOCKS)]
            options = {"host_memory": "256MiB", "min_load_tokens": 1}
            log = logs / f"server{number}.log"
            client = stack.enter_context(start_server(llama_with_tokenizer, log, options, *arguments))
            found.append(Node(client, f"tcp://127.0.0.1:{port}"))
        yield found


class Process:
    """A router's process, and its address."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [PYTHON, "-m", module, "--port", str(port), *arguments], stdout=out, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def until(self, expected: Any, ask: Any) -> None:
        """Until the router's answer is the expected one."""
        deadline = time.monotonic() + PATIENCE_S
        found: Any = None
        while found != expected:
            assert time.monotonic() < deadline, f"{found}, not {expected}: {self.log.read_text()[-3000:]}"
            time.sleep(0.1)
            try:
                found = ask(self.url)
            except httpx.TransportError as error:
                found = error


def test_dynamos_index_keeps_blocks_that_the_device_has_evicted(nodes: list[Node], tmp_path: Path) -> None:
    chats = [prompt(6 * BLOCK + 1, seed=seed) for seed in (1, 2)]
    workers = ",".join(f"{number}={node.endpoint}" for number, node in enumerate(nodes, 1))
    arguments = ["--block-size", str(BLOCK), "--workers", workers]
    with Process("dynamo.indexer", arguments, tmp_path / "indexer.log") as indexer:

        def blocks(ids: list[int]) -> Any:
            """The first blocks of a prompt that each worker has in any tier."""

            def ask(url: str) -> dict[int, int]:
                found = httpx.post(f"{url}/query", json={"token_ids": ids, "model_name": "default"}).json()
                return {int(worker): tiers["longest_matched"] // BLOCK for worker, tiers in found["instances"].items()}

            return ask

        indexer.until({}, blocks(chats[0]))
        # A subscriber hears of nothing that was published before it was there.
        time.sleep(1)
        for node, chat in zip(nodes, chats, strict=True):
            node.client.complete(chat, 1)
            node.publish(10)
        for number, chat in enumerate(chats, 1):
            indexer.until({number: 6}, blocks(chat))
        for node in nodes:
            node.fill(100)
        # vLLM alone would have told the indexer to forget both.
        for number, chat in enumerate(chats, 1):
            indexer.until({number: 6}, blocks(chat))
            [best] = blocks(chat)(indexer.url)
            answer = nodes[best - 1].client.complete(chat + prompt(BLOCK, seed=3), 1)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK
        # A reset of the device alone voids all for the indexer; undercroft tells its tiers again.
        nodes[0].client.reset_device()
        indexer.until({1: 6}, blocks(chats[0]))
        nodes[0].client.reset()
        nodes[0].publish(11)
        indexer.until({}, blocks(chats[0]))
        indexer.until({2: 6}, blocks(chats[1]))


def test_vllms_router_sends_the_next_turn_to_the_tiers_that_hold_the_conversation(
    nodes: list[Node], tmp_path: Path
) -> None:
    chats = [prompt(6 * BLOCK + 1, seed=seed) for seed in (21, 22)]
    urls = [node.client.server.url for node in nodes]
    arguments = ["--worker-urls", *urls, "--policy", "kv_aware", "--log-level", "debug"]
    arguments += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", "m"]
    for url, node in zip(urls, nodes, strict=True):
        arguments += ["--kv-event-source", f"{url}={node.endpoint}"]
    with Process("vllm_router.launch_router", arguments, tmp_path / "router.log") as router:

        def is_ready(url: str) -> int:
            return httpx.get(f"{url}/health").status_code

        router.until(200, is_ready)
        time.sleep(1)
        # Turns that the router did not send: it knows of them from events alone.
        for node, chat in zip(nodes, chats, strict=True):
            node.client.complete(chat, 1)
            node.publish(30)
        for node in nodes:
            node.fill(200)
        time.sleep(1)
        served = [[], []]
        for turn in range(4):
            for at, chat in enumerate(chats):
                body = {"model": "m", "prompt": chat + prompt(turn * 8 + 1, seed=40), "max_tokens": 1}
                before = [node.client.metric("vllm:request_success_total") for node in nodes]
                answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=300)
                assert answer.status_code == 200, answer.text + router.log.read_text()[-3000:]
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                after = [node.client.metric("vllm:request_success_total") for node in nodes]
                served[at].append(([now - then for now, then in zip(after, before, strict=True)], cached))
                for node in nodes:
                    node.fill(300 + 20 * turn)
        print(served)
        assert served == [[([1, 0], 6 * BLOCK)] * 4, [([0, 1], 6 * BLOCK)] * 4], router.log.read_text()[-6000:]
