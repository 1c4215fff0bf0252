"""States that vLLM's scheduler reaches rarely, with the scheduler itself over a modelled model."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from modelled_vllm import BLOCK, Vllm, continuation, vllm
from undercroft.connector.scheduler.saves import Saves

pytestmark = pytest.mark.vllm

STATES: dict[str, Any] = {"kinds": "sf", "max_model_len": 320, "max_num_batched_tokens": 256}
"""A hybrid model whose prompts take one step."""
OPTIONS = {"host_memory": "16MiB", "promotion_wait": "complete", "min_load_tokens": 1}


def prompt(blocks: int, seed: int) -> list[int]:
    """A prompt of whole blocks and some tokens."""
    return [random.Random(seed).randrange(50) for _ in range(blocks * BLOCK)] + [1, 2, 3]


def forget_device(one: Vllm) -> None:
    """Empty the device's own cache."""
    one.run()
    assert one.scheduler.reset_prefix_cache()


def test_a_failed_load_stops_no_request_that_waits_behind_it(llama: Path) -> None:
    """Without its load a prompt needs more blocks of the windows, and another loaded prompt holds these."""
    faults: dict[str, float] = {}
    chance = random.Random(0)
    first, second = prompt(18, 1), prompt(9, 2)
    with vllm(
        llama, OPTIONS, chance, kinds="wf", blocks=44, max_model_len=320, max_num_batched_tokens=256, faults=faults
    ) as one:
        for name, ids in (("a", first), ("b", second)):
            one.add(name, ids, 1)
            forget_device(one)
        faults["delay"] = 1.0
        one.add("first", first, 4)
        one.add("second", second, 4)
        one.step()
        assert len(one.scheduler.kv_holding_waiting) == 2
        # Jobs run in order: only the first load fails.
        faults.update(delay=0.0, load=1.0)
        [copier] = [worker._worker._copier for worker in one.workers]
        kept, copier._waiting = copier._waiting.pop(), copier._waiting
        one.step()
        faults["load"] = 0.0
        copier._waiting.append(kept)
        one.run(limit=100)
        assert one.outputs["first"] == continuation(first, 4)
        assert one.outputs["second"] == continuation(second, 4)
        assert (one.cached["first"], one.cached["second"]) == (0, 9 * BLOCK)


class Accepted(random.Random):
    """All drafts are right."""

    def randint(self, a: int, b: int) -> int:
        return b


def test_a_session_with_streaming_input_leaves_no_kv_of_drafts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes the KV of drafts after the end of a turn for that of the next turn's first tokens."""
    first, second = prompt(2, 1), prompt(4, 2)
    with vllm(llama, OPTIONS, Accepted(0), drafts=3, max_model_len=320) as one:
        with monkeypatch.context() as unchecked:
            unchecked.setattr(one, "_check", lambda *args: None)
            session = one.add("session", first, 3, resumable=True)
            while len(one.outputs["session"]) < 3:
                one.step()
            # vLLM 0.33 counts no drafts after the end of a turn.
            is_counted = importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is None
            assert (session.num_computed_tokens > session.num_tokens) == is_counted
            one.add("session", second, 1, resumable=True)
            while len(one.outputs["session"]) < 4:
                one.step()
            tokens = list(session.all_token_ids)
            one.add("session", [0], 1)
            forget_device(one)
        one.add("same", tokens, 4)
        one.run()
        assert one.outputs["same"] == continuation(tokens, 4)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_pause_may_clear_the_caches_while_a_loaded_request_waits(llama: Path, ahead: int) -> None:
    from vllm.v1.core.sched.interface import PauseState

    faults: dict[str, float] = {}
    ids, other = prompt(6, 1), prompt(3, 2)
    with vllm(llama, OPTIONS, random.Random(0), ahead=ahead, blocks=44, max_model_len=320, faults=faults) as one:
        one.add("first", ids, 1)
        forget_device(one)
        faults["delay"] = 1.0
        one.add("loaded", ids, 4)
        one.add("running", other, 30)
        for _ in range(4):
            one.step()
        faults["delay"] = 0.0
        one.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        one.run()
        assert one.scheduler.kv_holding_waiting
        assert one.blocks_in_use() > 0
        assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert one.blocks_in_use() == 0
        one.scheduler.set_pause_state(PauseState.UNPAUSED)
        one.run()
        assert (one.outputs["loaded"], one.outputs["running"]) == (continuation(ids, 4), continuation(other, 30))
        assert one.cached["loaded"] == 6 * BLOCK


def pause_and_clear(one: Vllm) -> None:
    """Pause, clear the device's cache, and go on."""
    from vllm.v1.core.sched.interface import PauseState

    one.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    one.run()
    assert one.blocks_in_use() > 0
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert one.blocks_in_use() == 0
    one.scheduler.set_pause_state(PauseState.UNPAUSED)


def test_a_pause_may_clear_the_caches_after_a_failed_load(llama: Path) -> None:
    """vLLM frees the blocks of a failed load only when it schedules the request again."""
    faults: dict[str, float] = {}
    ids = prompt(6, 1)
    with vllm(llama, OPTIONS, random.Random(0), blocks=44, max_model_len=320, faults=faults) as one:
        one.add("first", ids, 1)
        forget_device(one)
        faults["load"] = 1.0
        one.add("loaded", ids, 4)
        one.step()
        faults["load"] = 0.0
        pause_and_clear(one)
        one.run()
        assert one.outputs["loaded"] == continuation(ids, 4)


def test_a_pause_may_clear_the_caches_while_a_loaded_request_waits_for_more_blocks(llama: Path) -> None:
    """No reservation of vLLM for it is left: otherwise its next load could wait for room that is reserved for it."""
    faults: dict[str, float] = {}
    ids, other = prompt(16, 1), prompt(1, 2)
    with vllm(llama, OPTIONS, random.Random(0), blocks=24, max_model_len=320, faults=faults) as one:
        one.add("first", ids, 1)
        forget_device(one)
        faults["delay"] = 1.0
        one.add("running", other, 120)
        one.step()
        one.add("loaded", ids, 4)
        request = one.scheduler.requests["loaded"]
        while one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks():
            one.step()
        faults["delay"] = 0.0
        while request.status.name != "WAITING":
            one.step()
        assert one.scheduler.kv_holding_waiting
        pause_and_clear(one)
        one.run(limit=500)
        assert (one.outputs["loaded"], one.outputs["running"]) == (continuation(ids, 4), continuation(other, 120))
        assert one.cached["loaded"] == 16 * BLOCK


def test_a_loaded_request_does_not_stop_a_session_with_streaming_input(llama: Path) -> None:
    """vLLM takes requests that hold blocks in their order, and the first one waits for blocks of the next one."""
    faults: dict[str, float] = {}
    ids, other = prompt(9, 1), prompt(6, 2)
    with vllm(llama, OPTIONS, random.Random(0), blocks=24, max_model_len=320, faults=faults) as one:
        one.add("first", ids, 1)
        forget_device(one)
        one.add("session", other, 1, resumable=True)
        while one.outputs["session"] != continuation(other, 1):
            one.step()
        faults["delay"] = 1.0
        one.add("loaded", ids, 4)
        one.step()
        # Without the loaded blocks there is room.
        more = prompt(10, 3)
        one.add("session", more, 1, resumable=True)
        faults["delay"] = 0.0
        for _ in range(100):
            one.step()
        tokens = [*other, *more]
        assert one.outputs["session"] == continuation(other, 1) + continuation(tokens, 1)
        one.add("session", [0], 1)
        one.run()
        assert one.outputs["loaded"] == continuation(ids, 4)


def test_blocks_of_a_step_that_does_not_run_are_in_no_cache(llama: Path) -> None:
    """vLLM preempts a request for one of a higher priority, in the step that has scheduled the next tokens of both."""
    of_low, of_high = prompt(18, 1), [*prompt(5, 2), 4, 5, 6, 7, 8]
    budgets = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 32}
    with vllm(
        llama, OPTIONS, random.Random(0), blocks=24, max_model_len=320, scheduling_policy="priority", **budgets
    ) as one:
        low = one.add("low", of_low, 4, priority=2)
        for _ in range(3):
            one.step()
        one.add("high", of_high, 9, priority=0)
        one.run()
        assert low.num_preemptions == 1
        assert one.outputs["low"] == continuation(of_low, 4)
        assert one.outputs["high"] == continuation(of_high, 9)


def test_a_hit_that_lacks_states_begins_no_lookup_anew(llama: Path) -> None:
    """The device holds 2 blocks of the prompt without a state, and the tiers hold a state after the first block."""
    ids = prompt(6, 1)
    options = {**OPTIONS, "verify_host": True}
    with vllm(llama, options, random.Random(0), **STATES) as one:
        one.add("short", [*ids[:BLOCK], 1, 2, 3], 1)
        forget_device(one)
        one.add("long", ids, 1).skip_reading_prefix_cache = True
        one.run()
        same = [*ids[: 2 * BLOCK], *[4] * BLOCK, 5]
        one.add("same", same, 4)
        one.run()
        assert one.outputs["same"] == continuation(same, 4)
        assert one.cached["same"] == BLOCK


def test_a_request_that_waited_for_a_load_uses_blocks_that_lack_states(llama: Path) -> None:
    """Another request has loaded the first blocks, and only the tiers hold the state that ends the hit."""
    faults: dict[str, float] = {}
    shared = prompt(3, 1)[: 3 * BLOCK]
    first, second = (shared + prompt(2, seed) for seed in (2, 3))
    with vllm(llama, OPTIONS, random.Random(0), faults=faults, **STATES) as one:
        for name, ids in (("a", first), ("b", second)):
            one.add(name, ids, 1)
            forget_device(one)
        faults["delay"] = 1.0
        one.add("first", first, 4)
        one.add("second", second, 4)
        for _ in range(3):
            one.step()
        faults["delay"] = 0.0
        one.run()
        assert one.outputs["first"] == continuation(first, 4)
        assert one.outputs["second"] == continuation(second, 4)
        assert (one.cached["first"], one.cached["second"]) == (5 * BLOCK, 2 * BLOCK)


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines can limit the rate of their reads."""
    from undercroft import engine

    options_of = engine.engine_options
    monkeypatch.setattr(
        engine, "engine_options", lambda *args, **more: options_of(*args, **more) | {"inject_faults": True}
    )


def disk_options(directory: Path) -> dict[str, Any]:
    return {"host_memory": "16MiB", "disk_path": str(directory / "disk"), "disk_capacity": "64MiB"}


def test_a_late_answer_for_a_hit_without_states_begins_no_reads_anew(
    llama: Path, tmp_path: Path, slow_reads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds a part of the hit above the device's 4 blocks. The disk brings the rest late."""
    ids = prompt(16, 1)
    options = {
        **disk_options(tmp_path),
        "promotion_wait": {"base_ms": 50, "per_1k_tokens_ms": 0},
        "min_load_tokens": 1,
        "early_prefetch": False,
    }
    with vllm(llama, options, random.Random(0), **STATES) as one:
        for name, blocks in (("short", 6), ("all", 16)):
            one.add(name, [*ids[: blocks * BLOCK], 1, 2, 3], 1)
            one.run()
        assert one.scheduler.connector._engine.flush(10.0)
    with vllm(llama, options, random.Random(0), **STATES) as one:
        engine = one.scheduler.connector._engine
        one.add("short", [*ids[: 6 * BLOCK], 1, 2, 3], 1)
        forget_device(one)
        one.add("long", [*ids[: 4 * BLOCK], *[9] * (2 * BLOCK), 7], 1).skip_reading_prefix_cache = True
        one.run()
        assert engine.limit_reads(8_000.0)
        lookups, answers = one.scheduler.connector._scheduler.lookups, []
        look_up = lookups._look_up
        monkeypatch.setattr(lookups, "_look_up", lambda *args: answers.append(look_up(*args)) or answers[-1])
        one.add("same", ids, 4)
        while not one.outputs["same"]:
            one.step()
        engine.limit_reads(None)
        one.run()
        assert one.outputs["same"] == continuation(ids, 4)
        assert [answer.pending for answer in answers].index(False) == len(answers) - 1


def test_the_devices_blocks_without_states_cost_no_hit_of_the_tiers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiers hold a block more than the device. This block alone is not worth its load."""
    ids = prompt(8, 1)
    options = {**disk_options(tmp_path), "promotion_wait": "complete"}
    with vllm(llama, options, random.Random(0), **STATES) as one:
        one.add("same", ids, 1)
        one.run()
        assert one.scheduler.connector._engine.flush(10.0)
    with vllm(llama, options, random.Random(0), **STATES) as one:
        monkeypatch.setattr(Saves, "begin", lambda *args: [])
        one.add("long", [*ids[: 7 * BLOCK], *[9] * (2 * BLOCK), 7], 1).skip_reading_prefix_cache = True
        one.run()
        one.add("same", ids, 4)
        one.run()
        assert one.outputs["same"] == continuation(ids, 4)
        assert one.cached["same"] == 8 * BLOCK


def test_a_local_hit_that_ends_inside_a_block_is_completed_in_each_pass(
    llama: Path, tmp_path: Path, slow_reads: None
) -> None:
    """vLLM then asks from the begin of this block."""
    ids = prompt(8, 1)
    options = {**disk_options(tmp_path), "promotion_wait": "complete", "min_load_tokens": 1}
    with vllm(llama, options, random.Random(0), **STATES) as one:
        one.add("same", ids, 1)
        one.run()
        assert one.scheduler.connector._engine.flush(10.0)
    with vllm(llama, options, random.Random(0), **STATES) as one:
        engine, half = one.scheduler.connector._engine, one.scheduler.connector._scheduler
        assert engine.limit_reads(8_000.0)
        request = one.add("same", ids, 4)
        for _ in range(3):
            assert half._completes(request, 2 * BLOCK + 8)
            assert half.get_num_new_matched_tokens(request, 2 * BLOCK) == (None, False)
        engine.limit_reads(None)
        one.run()
        assert one.outputs["same"] == continuation(ids, 4)
