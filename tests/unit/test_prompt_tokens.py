"""Each prompt token counts once: on the device, loaded from a tier, or missed for a reason."""

from __future__ import annotations

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft.connector.observe.stats import SCHEDULER_KEYS
from undercroft.reasons import MISSED

PARTS = (
    "device_tokens",
    "hit_tokens_host",
    "hit_tokens_disk",
    "hit_tokens_remote",
    *(f"missed_tokens_{reason}" for reason in MISSED),
)
PREFIX = tokens(4 * BLOCK)


def counted(world):
    """The parts that are not zero; their sum is what was asked."""
    found = world.counts.collect().get("counters", {})
    parts = {name: found[name] for name in PARTS if name in found}
    assert sum(parts.values()) == found.get("asked_tokens", 0)
    return parts


def saved(ids=PREFIX, **options):
    world = World(**options)
    first = Request("saved", ids)
    world.prefill(first)
    world.finish(first)
    world.counts.collect()
    return world


def run(world, request, computed=0, lost=False):
    """A request from the scheduler's first question to its first step; ``computed``: tokens on the device."""
    ask = world.connector.get_num_new_matched_tokens
    gain, _ = ask(request, computed)
    assert gain is not None
    world.admit(request, external=gain)
    request.num_computed_tokens = computed + gain
    if gain:
        world.answer(world.step(), failed_loads=[request.request_id] if lost else ())
        if lost:
            request.num_computed_tokens = computed
        world.connector.update_state_after_alloc(request, None, 0)
    world.step([(request, request.num_tokens - request.num_computed_tokens)])


def test_every_part_has_a_counter():
    assert set(PARTS) | {"asked_tokens"} <= set(SCHEDULER_KEYS)


def test_a_prompt_that_nobody_has_seen():
    world = World()
    world.session.reasons["new"] = ("never_seen", None)
    run(world, Request("new", tokens(3 * BLOCK + 5)))
    assert counted(world) == {"missed_tokens_never_seen": 3 * BLOCK, "missed_tokens_prompt_end": 5}


def test_a_prefix_in_the_tiers_and_a_new_end():
    world = saved()
    world.session.reasons["b"] = ("evicted_disk", 3)
    run(world, Request("b", [*PREFIX, *tokens(2 * BLOCK + 1, 9)]), computed=BLOCK)
    assert counted(world) == {
        "device_tokens": BLOCK,
        "hit_tokens_host": 3 * BLOCK,
        "missed_tokens_evicted_disk": 2 * BLOCK,
        "missed_tokens_prompt_end": 1,
    }


@pytest.mark.parametrize("source", ["disk", "remote"])
def test_tokens_read_from_disk_or_the_remote_store(source):
    world = saved()
    world.session.lower()
    request = Request("b", [*PREFIX, 1])
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    world.session.promote(source)
    run(world, request)
    assert counted(world) == {f"hit_tokens_{source}": 4 * BLOCK, "missed_tokens_prompt_end": 1}


@pytest.mark.parametrize("ends", [4 * BLOCK, 4 * BLOCK + 1])
def test_a_prompt_of_which_the_device_has_all_blocks_is_a_lookup_too(ends):
    world = saved()
    request = Request("b", tokens(ends))
    ask = world.connector.get_num_new_matched_tokens
    assert ask(request, 4 * BLOCK) == ask(request, 4 * BLOCK) == (0, False)
    world.admit(request)
    request.num_computed_tokens = ends - 1
    world.step([(request, 1)])
    found = world.counts.collect()["counters"]
    assert found == {
        "lookups_on_device": 1,
        "asked_tokens": ends,
        "device_tokens": ends - 1,
        "missed_tokens_prompt_end": 1,
    }


def test_a_new_end_behind_a_prefix_on_the_device_is_no_miss_of_the_lookup():
    world = saved()
    run(world, Request("b", [*PREFIX, *tokens(2 * BLOCK, 9)]), computed=4 * BLOCK)
    run(world, Request("c", tokens(2 * BLOCK, 5)))
    # The tiers have more of it than the device, and nothing is loaded.
    world.session.failed.add("d")
    run(world, Request("d", [*PREFIX, 1]), computed=BLOCK)
    found = world.counts.collect()["counters"]
    assert {name: count for name, count in found.items() if "lookups" in name} == {
        "lookups_on_device": 1,
        "lookups_miss": 2,
    }


@pytest.mark.parametrize("fails", ["at once", "in a worker"])
def test_a_load_that_fails_brings_nothing(fails, monkeypatch):
    world = saved()
    if fails == "at once":
        monkeypatch.setattr(world.session, "begin_load", lambda *args: None)
    run(world, Request("b", [*PREFIX, 1]), lost=True)
    assert counted(world) == {"missed_tokens_load_failed": 4 * BLOCK, "missed_tokens_prompt_end": 1}


def test_a_whole_prompt_of_whole_blocks_computes_its_last_token():
    world = saved()
    request = Request("b", PREFIX)
    assert world.connector.get_num_new_matched_tokens(request, BLOCK) == (3 * BLOCK, True)
    world.admit(request, external=3 * BLOCK)
    world.answer(world.step())
    request.num_computed_tokens = 4 * BLOCK - 1
    world.step([(request, 1)])
    assert counted(world) == {
        "device_tokens": BLOCK,
        "hit_tokens_host": 3 * BLOCK - 1,
        "missed_tokens_prompt_end": 1,
    }


def test_a_load_that_a_reset_overtakes_is_asked_for_again():
    world = saved()
    request = Request("b", [*PREFIX, 1])
    assert world.connector.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    world.admit(request, external=4 * BLOCK)
    meta = world.step()
    world.connector._loading._given_up.add("b")
    world.answer(meta)
    world.connector.requests["b"].lost_blocks = False
    run(world, request)
    assert counted(world) == {"hit_tokens_host": 4 * BLOCK, "missed_tokens_prompt_end": 1}


def test_a_request_that_may_not_be_looked_up():
    world = saved()
    run(world, Request("b", [*PREFIX, 1], skip_reading_prefix_cache=True))
    assert counted(world) == {"missed_tokens_not_looked_up": 4 * BLOCK, "missed_tokens_prompt_end": 1}


def test_tokens_of_another_connector():
    world = saved()
    world.connector.lookups.prompt_tokens.has_siblings = True
    request = Request("b", [*PREFIX, *tokens(2 * BLOCK, 9), 1])
    assert world.connector.get_num_new_matched_tokens(request, BLOCK) == (3 * BLOCK, True)
    world.admit(request)
    request.num_computed_tokens = 6 * BLOCK
    world.step([(request, 1)])
    assert counted(world) == {
        "device_tokens": BLOCK,
        "missed_tokens_other_connector": 5 * BLOCK,
        "missed_tokens_prompt_end": 1,
    }


@pytest.mark.parametrize("rest", [None, ("complete", None)])
def test_a_hit_that_vllm_does_not_take(rest):
    world = saved()
    world.session.reasons["b"] = rest
    request = Request("b", [*PREFIX, 1])
    assert world.connector.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    world.admit(request)
    world.step([(request, request.num_tokens)])
    assert counted(world) == {"missed_tokens_not_taken": 4 * BLOCK, "missed_tokens_prompt_end": 1}


def test_a_lookup_that_was_given_up(monkeypatch):
    world = saved()
    world.session.lower()
    monkeypatch.setattr("undercroft.connector.scheduler.lookups.LOOKUP_DEADLINE_S", 0)
    run(world, Request("b", [*PREFIX, 1]))
    assert counted(world) == {"missed_tokens_timed_out": 4 * BLOCK, "missed_tokens_prompt_end": 1}


def test_only_the_first_run_counts_and_an_aborted_request_does_not():
    world = saved()
    request = Request("b", [*PREFIX, 1])
    run(world, request)
    assert counted(world)
    request.num_preemptions = 1
    request.append(2, 3)
    run(world, request)
    # A session with streaming input goes on without a question.
    world.connector.update_state_after_alloc(request, None, 0)
    world.step([(request, 1)])
    aborted = Request("c", [*PREFIX, 1])
    assert world.connector.get_num_new_matched_tokens(aborted, 0) == (4 * BLOCK, True)
    world.admit(aborted, external=4 * BLOCK)
    meta = world.step()
    world.finish(aborted)
    world.answer(meta)
    world.step([(aborted, 1)])
    assert counted(world) == {}
    assert world.connector.lookups.prompt_tokens.waiting == {}
    assert world.errors == []
