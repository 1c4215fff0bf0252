"""Speculative decoding in real engines: the draft's layers are saved and loaded too, and hits end where vLLM's do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from connector_engine import core
from hybrid_engine import HOST, TOKENS, Model, ask
from real_engine import Engine, prompt
from tiny_models import MODELS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 128
MODEL = Model("", Path(), "float32", BLOCK, 0)
same, ids = MODEL.same, MODEL.ids


@dataclass(frozen=True)
class Draft:
    """Models, drafts a step, and the groups whose hits vLLM ends a block earlier."""

    target: str
    model: str
    tokens: int
    dropped: set[int]


DRAFTS = {
    # vLLM 0.32 cannot tell which group is the draft's here, and takes all for it.
    "eagle": Draft("llama", "eagle", 2, {0}),
    "mtp": Draft("llama_windows", "mtp", 1, {1}),
    "draft_model": Draft("llama", "llama", 3, set()),
}
Start = Callable[..., Engine]


@pytest.fixture
def start(model_root: Path) -> Any:
    """Makes engines by the name of how drafts are made, and closes them when the test ends."""
    started: list[Engine] = []

    def make(method: str, options: dict[str, Any] | None) -> Engine:
        draft = DRAFTS[method]
        target, drafter = (MODELS[name](model_root / name) for name in (draft.target, draft.model))
        speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": draft.tokens}
        one = replace(MODEL, directory=target).start(options, max_model_len=2048, speculative_config=speculative)
        started.append(one)
        assert one.scheduler.kv_cache_manager.coordinator.eagle_group_ids == draft.dropped
        assert draft_layers(one)
        return one

    yield make
    for one in reversed(started):
        one.close()


def draft_layers(running: Engine) -> list[str]:
    """The draft's layers: those after the four of the target."""
    names = [name for group in running.scheduler.kv_cache_config.kv_cache_groups for name in group.layer_names]
    return [name for name in names if name.startswith("draft_model.") or ".layers.4." in name]


def hit(method: str, blocks: int, lookahead: int) -> int:
    """Tokens that vLLM hits of so many cached blocks and another token, if hashes cover ``lookahead`` more tokens."""
    return (blocks - (bool(DRAFTS[method].dropped) and not lookahead)) * BLOCK


def accepted() -> float:
    """Drafts that were right, of all engines of this process."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return sum(one.value for one in get_metrics_snapshot() if one.name == "vllm:spec_decode_num_accepted_tokens")


@pytest.mark.parametrize("method", DRAFTS)
def test_from_host_memory_and_after_a_restart(method: str, start: Start, tmp_path: Path) -> None:
    options = {"host_memory": HOST, "disk_path": str(tmp_path / "cache"), "disk_capacity": "1GiB"}
    first, local = start(method, options), []
    matched = first.connector.get_num_new_matched_tokens
    first.connector.get_num_new_matched_tokens = lambda request, n: (local.append(n), matched(request, n))[1]
    turn = ids(4) + first.generate(ids(4), TOKENS, cache_salt="turn").tokens + prompt(2 * BLOCK, seed=5)
    prompts, alone = (ids(1, seed=2), ids(4), turn), []
    for one in prompts:
        alone.append(first.generate(one, TOKENS, logprobs=5, cache_salt=str(len(one))))
        first.generate(one, 1, cache_salt=str(len(one)))
    lookahead = getattr(first.core.vllm_config, "num_hash_lookahead_tokens", 0)
    # vLLM switches lookahead hashes off beside other connectors, and then hits a block less.
    assert lookahead == (hasattr(VllmConfig, "num_hash_lookahead_tokens") and bool(DRAFTS[method].dropped))
    one, four, six = (hit(method, blocks, lookahead) for blocks in (1, 4, 6))
    assert local == [0, 0, one, 0, four, 0, six], "what vLLM itself hits on the device"
    answers = [[ask(first, one), ask(first, one)] for one in prompts]
    assert core(first).flush(30.0)
    first.close()
    running = start(method, options)
    answers[1] += [ask(running, ids(4))]
    assert core(running).stats()["disk_reads"] > 0
    for count in (2, 4):  # Part of it is on the device.
        ask(running, ids(count), 1, reset=False)
        answers[2].append(ask(running, turn))
    assert all(same(one, expected) for expected, found in zip(alone, answers, strict=True) for one in found)
    assert [[one.cached for one in found] for found in answers] == [[0, one], [0, four, four], [four, six, six, six]]
    assert core(running).stats()["checksum_failures"] == core(running).stats()["load_failures"] == 0


@pytest.mark.parametrize("method", DRAFTS)
def test_a_prompt_that_ends_with_a_block(method: str, start: Start) -> None:
    """A draft model's KV does not depend on the next token, so the last block is hit too, and its last token computed
    again."""
    running = start(method, {"host_memory": HOST})
    whole = ids(4)[:-1]
    answers = [ask(running, whole), ask(running, whole), ask(running, whole)]
    assert [answer.cached for answer in answers] == [0, *[(4 if method == "draft_model" else 3) * BLOCK] * 2]
    assert all(same(answer, answers[0]) for answer in answers)


def test_the_drafts_layers_are_loaded(start: Start) -> None:
    """The draft is the target itself: its drafts are right as long as its own KV is."""
    running = start("draft_model", {"host_memory": HOST})
    answers, right = [], [accepted()]
    for again in range(4):
        if again == 3:
            # Counter-check, with the target's own blocks left on the device.
            for name in draft_layers(running):
                running.core.vllm_config.compilation_config.static_forward_context[name].kv_cache.zero_()
        answers.append(ask(running, ids(4), reset=again != 2))
        right.append(accepted())
    cold, warm, _, spoilt = (after - before for before, after in pairwise(right))
    assert [answer.cached for answer in answers] == [0, *[4 * BLOCK] * 3]
    assert all(same(answer, answers[0]) for answer in answers)
    assert warm == cold >= TOKENS // 2 and spoilt < cold // 2


def test_bytes_of_another_prompt_would_be_noticed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from undercroft.connector.scheduler import scheduler

    running = start("mtp", {"host_memory": HOST})
    other = prompt(2 * BLOCK + 1, seed=4)
    cold, _ = ask(running, ids(2)), ask(running, other)
    plan_load, theirs = scheduler.plan_load, {}

    def swapped(*arguments: Any) -> Any:
        plan = plan_load(*arguments)
        for copy in plan.job.groups:
            copy.offsets = theirs.setdefault(copy.group, copy.offsets.copy())
        return plan

    monkeypatch.setattr(scheduler, "plan_load", swapped)
    assert ask(running, other).cached and theirs
    assert not same(ask(running, ids(2)), cold)
    monkeypatch.undo()
    assert same(ask(running, ids(2)), cold)
