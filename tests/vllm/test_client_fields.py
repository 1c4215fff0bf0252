"""A client of vLLM's HTTP API, under the default options: it holds nobody up, and learns nothing of others' prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_checks import BLOCK, nothing_left
from real_engine import Engine, prompt
from threshold_http import Client, start_server, the_choice

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]

SECRET = prompt(12 * BLOCK + 7)
GUESS = SECRET[: 3 * BLOCK] + prompt(9 * BLOCK + 7, seed=3)
GLOBAL = 0.4


@pytest.fixture(scope="module")
def client(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    options = {"client_fields": "none", "host_memory": "128MiB", "min_load_tokens": 1, "cache_hit_threshold": GLOBAL}
    with start_server(llama_with_tokenizer, log, options, "--num-gpu-blocks-override", "256") as client:
        yield client


FIELDS: dict[str, dict[str, Any]] = {
    "threshold": {"cache_hit_threshold": 0.99},
    "no threshold": {"cache_hit_threshold": 0},
    "nested threshold": {"kv_transfer_params": {"cache_hit_threshold": 0}},
    "threshold in vllm_xargs": {"vllm_xargs": {"cache_hit_threshold": 0}},
    "forged exemption": {"vllm_xargs": {"undercroft_exempt": 1}},
    "explain": {"kv_transfer_params": {"explain": True}},
    "pin": {"kv_transfer_params": {"kv_hints": {"pin": True, "release": True}}},
    "prefetch": {"kv_transfer_params": {"kv_hints": {"prefetch": {"tokens": BLOCK}}}},
}


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FIELDS)
def test_an_answer_is_the_same_for_every_prompt_below_the_operators_threshold(client: Client, name: str) -> None:
    """The guess shares a quarter with the secret prompt, and the other nothing: a difference would be an oracle."""
    client.raw({"prompt": SECRET, "max_tokens": 1}, "/v1/completions")
    told = []
    for ids in (GUESS, prompt(len(GUESS), seed=4)):
        answer = client.complete(ids, 2, **FIELDS[name])
        assert the_choice(answer)["finish_reason"] == "cache_threshold"
        assert answer["kv_transfer_params"]["cache_threshold"] == {"threshold": GLOBAL, "source": "global"}
        told.append(answer["kv_transfer_params"])
    assert told[0] == told[1]


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hints_alone_and_misspelled_fields_are_answered_over_http(client: Client) -> None:
    hints = {"pin": {"ttl_s": 60}, "compute": False}
    answers = [
        client.complete(ids, 1, kv_transfer_params={"kv_hints": hints}) for ids in (GUESS, prompt(len(GUESS), seed=4))
    ]
    for answer in answers:
        assert the_choice(answer)["finish_reason"] == "kv_hint"
        assert answer["kv_transfer_params"]["kv_hints"] == {
            "pin": {"answer": "rejected", "tokens": 0, "reason": "not_allowed"}
        }
    assert answers[0]["kv_transfer_params"] == answers[1]["kv_transfer_params"]
    # The endpoint of messages is exempt from the operator's threshold.
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "kv_transfer_params": {"kv_hint": {}}}
    answer = client.raw(body, "/v1/messages").json()
    assert answer["kv_transfer_params"]["not_used"] == {"kv_hint": {"reason": "unknown", "nearest": "kv_hints"}}
    client.wait_until_idle()
    deadline = time.monotonic() + 30
    while not client.metric("vllm:undercroft_request_fields_not_used_total", field="kv_hints", reason="not_allowed"):
        assert time.monotonic() < deadline, "the field is not counted"
        time.sleep(0.2)
    assert client.metric("vllm:undercroft_hook_errors_total") == 0


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_request_id_forges_no_line_of_the_log(client: Client) -> None:
    forged = "x\n(APIServer pid=1) INFO 11-25 00:00:00 undercroft: FORGED LINE\x1b[2J"
    answer = client.raw({"prompt": GUESS, "max_tokens": 1, "request_id": forged})
    assert answer.status_code == 200
    client.wait_until_idle()
    lines = [line for line in client.server.log.read_text().splitlines() if "rejected: cache hit rate" in line]
    [line] = [line for line in lines if "FORGED LINE" in line]
    assert r"x\x0a(APIServer" in line and r"\x1b[2J" in line and line.isprintable()


IN_PROCESS: dict[str, dict[str, Any]] = {
    "threshold": {"extra_args": {"cache_hit_threshold": 0.99}},
    "no threshold": {"extra_args": {"cache_hit_threshold": 0}},
    "nested threshold": {"params": {"cache_hit_threshold": 0}},
    "forged exemption": {"extra_args": {"undercroft_exempt": True}},
    "explain": {"params": {"explain": True}},
    "pin": {"params": {"kv_hints": {"pin": True, "release": True}}},
    "prefetch": {"params": {"kv_hints": {"prefetch": {"tokens": BLOCK}}}},
}


def test_no_field_distinguishes_a_guess_from_any_other_prompt(engine: Make, llama: Path) -> None:
    """The guess shares a quarter with the secret prompt, and the other nothing: a difference would be an oracle."""
    options = {"client_fields": "none", "host_memory": "32MiB", "min_load_tokens": 1, "cache_hit_threshold": GLOBAL}
    running = engine(llama, options, blocks=64)
    assert running.generate(SECRET, 1, extra_args={"cache_hit_threshold": 0}).finish_reason == "cache_threshold"
    running.connector._threshold._global = 0.0
    assert running.generate(SECRET, 1).finish_reason == "length"
    assert running.generate(GUESS[:-1], 1).cached == 3 * BLOCK
    running.connector._threshold._global = GLOBAL
    other = prompt(len(GUESS), seed=4)
    for name, given in IN_PROCESS.items():
        found = [running.generate(ids, 2, **given) for ids in (GUESS[: 4 * BLOCK + 1] + other[4 * BLOCK + 1 :], other)]
        assert [one.finish_reason for one in found] == ["cache_threshold"] * 2, name
        told = [one.kv_transfer_params for one in found]
        assert told == [{"cache_threshold": {"threshold": GLOBAL, "source": "global"}}] * 2, name
    alone = {"kv_hints": {"pin": {"ttl_s": 60}, "compute": False}}
    refused = {"answer": "rejected", "tokens": 0, "reason": "not_allowed"}
    for ids in (GUESS, other):
        found = running.generate(ids, 1, params=alone)
        assert (found.finish_reason, found.kv_transfer_params) == ("kv_hint", {"kv_hints": {"pin": refused}})
    nothing_left(running)


def test_no_client_makes_the_scheduler_wait_for_a_disk(engine: Make, llama: Path, tmp_path: Path) -> None:
    options = {"host_memory": "32MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}
    ids = prompt(5 * BLOCK + 1)
    first = engine(llama, options, blocks=64)
    expected = first.generate(ids, 2).tokens
    nothing_left(first, reset=False)
    first.close()
    running = engine(llama, options, blocks=64)
    waits: list[Any] = []
    running.connector._scheduler.lookups.blocking.wait = lambda *asked: waits.append(asked)
    asks = {"lookup": "blocking", "lookup_timeout_ms": 60_000, "promotion_wait": "complete"}
    found = running.generate(ids, 2, params=asks)
    assert (found.tokens, found.cached) == (expected, 5 * BLOCK)
    assert found.kv_transfer_params is not None
    over = {"reason": "over_limit"}
    assert found.kv_transfer_params["not_used"] == {"lookup": over, "lookup_timeout_ms": over}
    assert waits == []
    nothing_left(running)
