"""Hints about prompts in a real vLLM: pins, prefetches without computing, and their answers in the response."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_checks import BLOCK, PAYLOAD, nothing_left, stats
from real_engine import Engine, prompt
from threshold_http import start_server, the_choice
from undercroft.cli.main import main

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]

CHAT = prompt(5 * BLOCK + 1)
OTHER = prompt(5 * BLOCK + 1, seed=2)


def hints(**verbs: Any) -> dict[str, Any]:
    return {"kv_hints": verbs}


def flood(running: Engine, blocks: int) -> None:
    """Save so many blocks of prompts that no test asks for again."""
    for index in range(blocks // 7 + 1):
        running.generate(prompt(7 * BLOCK + 1, seed=100 + index), 1)
    running.idle_steps()


def cached(running: Engine, ids: list[int]) -> int:
    """Tokens of a prompt that undercroft has."""
    running.idle_steps()
    assert running.reset_device_cache()
    return running.generate(ids, 1).cached


def answers(running: Engine, ids: list[int], **verbs: Any) -> dict[str, Any]:
    found = running.generate(ids, 1, params=hints(**verbs)).kv_transfer_params
    assert found is not None
    return found["kv_hints"]


def test_a_pinned_conversation_outlives_ten_turnovers_of_the_cache(engine: Make, llama: Path) -> None:
    running = engine(llama, {"host_memory": "32MiB"}, blocks=64)
    chat = CHAT
    for turn in range(3):
        chat = chat + prompt(turn * BLOCK, seed=20 + turn)
        accepted = {"answer": "accepted", "tokens": len(chat) // BLOCK * BLOCK}
        assert answers(running, chat, pin={"ttl_s": 600, "id": "chat"}) == {"pin": accepted}
    blocks = 8
    assert (stats(running)["pins"], stats(running)["pin_bytes"]) == (1, blocks * PAYLOAD)
    assert running.generate(OTHER, 1).kv_transfer_params is None
    capacity = stats(running)["host_capacity_bytes"] // PAYLOAD
    flood(running, 10 * capacity)
    assert stats(running)["host_evictions"] > 9 * capacity
    assert cached(running, OTHER) == 0
    assert cached(running, chat) == blocks * BLOCK
    # The others have all that the pin leaves them.
    assert stats(running)["host_blocks"] == capacity
    assert answers(running, chat, release={"id": "chat"}) == {"release": accepted}
    flood(running, 2 * capacity)
    assert cached(running, chat) == 0
    nothing_left(running)


def test_a_prefetch_reads_from_disk_and_computes_nothing(engine: Make, llama: Path, tmp_path: Path) -> None:
    options = {"host_memory": "32MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}
    first = engine(llama, options, blocks=64)
    first.generate(CHAT, 1)
    nothing_left(first, reset=False)
    first.close()
    running = engine(llama, options, blocks=64)
    found = running.generate(CHAT, 4, params=hints(prefetch={}, compute=False))
    accepted = {"answer": "accepted", "tokens": 5 * BLOCK}
    assert (found.tokens, found.finish_reason) == ([], "kv_hint")
    assert found.kv_transfer_params == hints(prefetch=accepted)
    deadline = time.monotonic() + 60
    while stats(running)["active_lookups"]:
        assert time.monotonic() < deadline, "the prefetch does not end"
        time.sleep(0.001)
    nothing_left(running, reset=False)
    assert (stats(running)["disk_reads"], stats(running)["host_blocks"]) == (5, 5)
    # The next turn pays for host memory only.
    running.generate(CHAT, 1)
    assert (stats(running)["disk_reads"], stats(running)["loads"]) == (5, 0)
    assert stats(running)["hints_prefetch_accepted"] == 1
    unknown = running.generate(OTHER, 4, params=hints(prefetch={}, compute=False))
    assert unknown.kv_transfer_params == hints(prefetch={"answer": "rejected", "tokens": 0, "reason": "not_cached"})


def test_hints_are_answered_one_by_one(engine: Make, llama: Path) -> None:
    running = engine(llama, {"host_memory": "32MiB", "pin_memory": 0}, blocks=64)
    found = answers(running, CHAT, retain={"tokens": 2 * BLOCK}, demote=True, release={"id": "x"}, guess={"what": 1})
    assert found == {
        "guess": {"answer": "unknown"},
        "retain": {"answer": "rejected", "tokens": 0, "reason": "off"},
        "demote": {"answer": "accepted", "tokens": 5 * BLOCK},
        "release": {"answer": "rejected", "tokens": 0, "reason": "not_pinned"},
    }


def test_typed_hints_are_understood(engine: Make, llama: Path) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    running = engine(llama, {"host_memory": "32MiB"}, blocks=64)
    one = KvHintAction("first", "kv.pin", "1.0", {"ttl_s": 60, "id": "chat"})
    other = KvHintAction("second", "kv.share", "1.0", {})
    later = KvHintAction("third", "kv.pin", "7", {})
    envelope = KvHintsEnvelope("1.0", "message", [one, other, later])
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    inputs: Any = {"prompt_token_ids": CHAT}
    running.llm.llm_engine.add_request("typed", inputs, sampling, kv_hints=envelope)
    while running.llm.llm_engine.has_unfinished_requests():
        [*outputs] = running.llm.llm_engine.step()
    assert outputs[-1].kv_transfer_params == hints(
        first={"answer": "accepted", "tokens": 5 * BLOCK},
        second={"answer": "unknown"},
        third={"answer": "unknown", "nearest": "pin"},
    )
    bad = KvHintsEnvelope("1.0", "message", [KvHintAction("first", "pin", "1", {"ttl_s": -1})])
    with pytest.raises(VLLMValidationError, match="ttl_s"):
        running.llm.llm_engine.add_request("bad", inputs, sampling, kv_hints=bad)


@pytest.mark.parametrize(
    "verbs",
    [{"pin": {"ttl_s": 0}}, {"pin": {"colour": 1}}, {"prefetch": 5}, {"release": {"id": ""}}, {"compute": "no"}],
)
def test_bad_hints_are_refused(engine: Make, llama: Path, verbs: dict[str, Any]) -> None:
    from vllm.exceptions import VLLMValidationError

    running = engine(llama, {"host_memory": "32MiB"}, blocks=64)
    with pytest.raises(VLLMValidationError, match=r"kv_transfer_params\.kv_hints.* allowed is"):
        running.generate(CHAT, 1, params={"kv_hints": verbs})
    nothing_left(running)


def test_hints_over_http(llama_with_tokenizer: Path, tmp_path: Path) -> None:
    options = {"host_memory": "32MiB", "min_load_tokens": 1}
    arguments = ("--num-gpu-blocks-override", "64")
    with start_server(llama_with_tokenizer, tmp_path / "log", options, *arguments) as client:
        accepted = {"answer": "accepted", "tokens": 5 * BLOCK}
        answer = client.complete(CHAT, 1, kv_transfer_params=hints(pin={"ttl_s": 600, "id": "chat"}, demot={}))
        assert answer["kv_transfer_params"] == hints(pin=accepted, demot={"answer": "unknown", "nearest": "demote"})
        for index in range(30):
            client.complete(prompt(7 * BLOCK + 1, seed=100 + index), 1)
        client.reset_device()
        answer = client.complete(CHAT, 1, kv_transfer_params=hints(release={"id": "chat"}, compute=False))
        assert the_choice(answer)["finish_reason"] == "kv_hint"
        assert answer["kv_transfer_params"] == hints(release=accepted)
        assert client.complete(CHAT, 1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 5 * BLOCK
        refused = client.raw({"prompt": CHAT, "max_tokens": 1, "kv_transfer_params": hints(pin={"ttl_s": 0})})
        assert (refused.status_code, "a number of seconds from 1 to 86400" in refused.text) == (400, True)
        deadline = time.monotonic() + 30
        while not client.metric("vllm:undercroft_hints_total", verb="release", answer="accepted"):
            assert time.monotonic() < deadline, "the hint is not counted"
            time.sleep(0.2)
        assert client.metric("vllm:undercroft_hints_total", verb="unknown") == 1
        file = tmp_path / "prompts"
        file.write_text(json.dumps(CHAT), encoding="utf-8")
        assert main(["pin", "--url", client.server.url, str(file)]) == 0
        assert main(["unpin", "--url", client.server.url, str(file)]) == 0
        assert main(["unpin", "--url", client.server.url, str(file)]) == 1
        # A prompt that nobody has asked for is computed first, and pinned then.
        file.write_text(json.dumps(OTHER), encoding="utf-8")
        assert main(["pin", "--url", client.server.url, str(file)]) == 1
        assert main(["warm", "--url", client.server.url, str(file)]) == 0
        client.wait_until_idle()
        assert main(["pin", "--url", client.server.url, str(file)]) == 0
