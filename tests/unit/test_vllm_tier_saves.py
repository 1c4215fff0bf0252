"""Saves that lack their prefixes: the tier saves them again, with the prefixes that vLLM's host memory has."""

from __future__ import annotations

import itertools
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from test_vllm_tier import HASH, chunks, full, state
from undercroft.vllm_tier.tier import _SAVE_S, UndercroftTier


class Parent:
    """vLLM's host memory: it has the chunks that end behind ``gone`` tokens. Those behind ``arrived`` are being copied
    there."""

    def __init__(self, gone: int = 0, arrived: int = 1 << 30) -> None:
        self.gone, self.arrived, self.lookups, self.saved = gone, arrived, 0, 0

    def lookup(self, chunk: Any, context: Any) -> LookupResult:
        self.lookups += 1
        end = context.get_offload_key_position(chunk)
        if end <= self.gone:
            return LookupResult.MISS
        return LookupResult.HIT if end <= self.arrived else LookupResult.HIT_PENDING

    def create_store_job(self, chunks: list[Any], context: Any) -> Any:
        self.saved += 1
        return SimpleNamespace(keys=chunks)

    def on_new_request(self, context: Any) -> None:
        pass

    on_request_finished = on_new_request


def lacking(prompts: int, blocks: int, group: int = 0) -> Any:
    """A tier with saves of a group whose prefixes it lacks: of chunks, or (1) of states. Their request runs."""
    tier: Any = object.__new__(UndercroftTier)
    tier._chunks, tier._again, tier._begin_save = chunks([full(), state()]), itertools.count(), None
    tier._submit = lambda *_: None
    hashes = [number.to_bytes(32, "big") for number in range(blocks)]
    request = SimpleNamespace(request_id="r", block_hashes=hashes)
    places = {tier._chunks.at(group, number) for number in range(blocks - 4, blocks)}
    lacks = {0: frozenset(range(blocks - 4))}
    tier._lacking = deque()
    prompt = SimpleNamespace(request=request)
    tier._prompts = SimpleNamespace(known={"r": prompt})
    for _ in range(prompts):
        tier._save_again(prompt, places, lacks)
    return tier


def test_one_step_makes_up_for_the_prefixes_of_one_long_prompt_only() -> None:
    tier, parent = lacking(5, 2000), Parent()
    steps = 0
    while tier._lacking:
        before = parent.lookups
        tier.serve_external_requests(parent)
        assert parent.lookups - before <= 2002
        steps += 1
    assert (steps, parent.saved) == (5, 5)
    tier, parent = lacking(60, 100), Parent()
    tier.serve_external_requests(parent)
    assert parent.saved == 10, "short prompts share a step"


def test_a_prefix_that_vllm_has_not_either_costs_one_lookup() -> None:
    tier, parent = lacking(60, 2000), Parent(gone=HASH)
    tier.serve_external_requests(parent)
    assert (parent.lookups, parent.saved, len(tier._lacking)) == (60, 0, 0)


@pytest.mark.parametrize("arrived", [0, 40 * HASH])
def test_a_save_waits_for_a_prefix_that_vllm_is_copying(arrived: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM copies the states of a prompt from the device before the chunks that lie before them."""
    tier, parent = lacking(60, 100), Parent(arrived=arrived)
    order = [id(again) for again in tier._lacking]
    with monkeypatch.context() as walks:
        walks.setattr(type(tier._chunks), "at", lambda *_: pytest.fail("a step goes through a prompt that waits"))
        for _ in range(3):
            before = parent.lookups
            tier.serve_external_requests(parent)
            assert (parent.saved, parent.lookups - before) == (0, 120), "the first chunk and the last one are looked up"
            assert [id(again) for again in tier._lacking] == order
    parent.arrived = 100 * HASH
    while tier._lacking:
        tier.serve_external_requests(parent)
    assert parent.saved == 60


def test_a_step_looks_at_some_of_many_saves_that_wait_in_turn() -> None:
    tier, parent = lacking(256, 2000), Parent(arrived=0)
    oldest = tier._lacking[0]
    tier.serve_external_requests(parent)
    assert (parent.lookups, len(tier._lacking)) == (256, 256)
    tier.serve_external_requests(parent)
    assert (parent.lookups, tier._lacking[0]) == (512, oldest)


def test_saves_that_wait_hold_up_no_other_save() -> None:
    tier, parent = lacking(200, 100), Parent(arrived=50 * HASH)
    tier._lacking += lacking(1, 40)._lacking
    for _ in range(2):
        tier.serve_external_requests(parent)
    assert (parent.saved, len(tier._lacking)) == (1, 200)


def test_a_save_ends_if_its_prefix_does_not_arrive() -> None:
    tier, parent = lacking(2, 100), Parent(arrived=40 * HASH)
    tier.serve_external_requests(parent)
    assert len(tier._lacking) == 2
    parent.gone = 50 * HASH
    tier.serve_external_requests(parent)
    assert (parent.saved, len(tier._lacking)) == (0, 0)


@pytest.mark.parametrize("ends", ["arrives", "too late", "finished"])
def test_a_state_waits_for_a_prefix_for_which_vllm_has_no_room(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tries it again in each step, as long as the request runs."""
    tier, parent, now = lacking(2, 100, group=1), Parent(gone=100 * HASH), [0.0]
    tier._lacking = deque(again._replace(until=_SAVE_S) for again in tier._lacking)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for now[0] in (0.0, 0.9 * _SAVE_S):
        before = parent.lookups
        tier.serve_external_requests(parent)
        assert (parent.lookups - before, parent.saved, len(tier._lacking)) == (2, 0, 2), "one lookup for each"
    match ends:
        case "arrives":
            parent.gone = 0
        case "too late":
            now[0] = _SAVE_S
        case _:
            tier._prompts.known.clear()
    tier.serve_external_requests(parent)
    assert (parent.saved, len(tier._lacking)) == (2 * (ends == "arrives"), 0)
