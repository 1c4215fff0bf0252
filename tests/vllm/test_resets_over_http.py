"""Resets, pauses and sleep over HTTP while loads and saves are under way: vLLM answers at once, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from real_engine import prompt
from threshold_http import Client, start_server, the_choice

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

WHOLE = prompt(897)
CACHED = 896
TRIES = 10
"""A request is sent and vLLM is reset while its load runs: the load takes a second, but a machine may be busy."""


@pytest.fixture(scope="module")
def client(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    options = {"host_memory": "64MiB", "promotion_wait": "complete", "min_load_tokens": 1}
    arguments = ("--num-gpu-blocks-override", "64")
    connector = ("SlowCopies", "slow_copies")
    with start_server(llama_with_tokenizer, log, options, *arguments, connector=connector) as client:
        yield client


def given_up(client: Client) -> float:
    return client.metric("vllm:undercroft_given_up_transfers_total", direction="load", reason="reset")


def loads(client: Client) -> float:
    return client.metric("vllm:undercroft_transfers_total", tier="host", direction="load")


def reset(client: Client) -> None:
    answer = client.http.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
    assert (answer.status_code, answer.json()) == (200, {"success": True})


def pause(client: Client) -> None:
    """Pause, which aborts requests and clears vLLM's caches, and go on."""
    assert client.http.post("/pause", params={"mode": "abort", "clear_cache": "true"}).status_code == 200
    assert client.http.get("/is_paused").json() == {"is_paused": True}
    assert client.http.post("/resume").status_code == 200


def sleep(client: Client) -> None:
    assert client.http.post("/sleep", params={"level": 1}).status_code == 200
    assert client.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.http.post("/wake_up").json()["status"] == "awake"


CALLS = {"reset": (reset, CACHED), "pause": (pause, 0), "sleep": (sleep, CACHED)}
"""Each call, and the tokens of the prompt that the tiers hold after it: a pause that clears drops them."""


def until_it_loads(client: Client, answer: Future[Any]) -> bool:
    """Wait until vLLM has the request; whether it has not answered it yet."""
    while not answer.done():
        if any(client.metric(f"vllm:num_requests_{where}") for where in ("waiting", "running")):
            return True
    return False


def during_a_load(client: Client, call: str) -> str:
    """One call while a prompt is loaded. How the request ended."""
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.complete, WHOLE)
        if until_it_loads(client, answer):
            CALLS[call][0](client)
        reason: str = the_choice(answer.result(timeout=120))["finish_reason"]
    assert client.http.get("/is_paused").json() == {"is_paused": False}
    return reason


@pytest.fixture(scope="module")
def tokens(client: Client) -> list[int]:
    """The answer, computed."""
    return the_choice(client.complete(WHOLE))["token_ids"]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_during_a_load_is_answered_and_the_prompt_is_served(
    client: Client, tokens: list[int], call: str
) -> None:
    for _ in range(TRIES):
        client.reset_device()
        before = given_up(client), loads(client)
        reason = during_a_load(client, call)
        client.reset_device()
        answer = client.complete(WHOLE)
        assert the_choice(answer)["token_ids"] == tokens
        client.wait_until_idle()
        # A reset gives the load up. The other calls abort the request, and wait for its load.
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if given_up(client) > before[0] or (reason == "abort" and loads(client) == before[1] + 1 + bool(cached)):
            assert cached == CALLS[call][1]
            break
    else:
        pytest.fail(f"no load was overtaken in {TRIES} tries")
    failures = ("hook_errors", "load_failures", "save_failures")
    assert {name: client.metric(f"vllm:undercroft_{name}_total") for name in failures} == dict.fromkeys(failures, 0)
