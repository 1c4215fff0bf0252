"""Blocking lookups: they wait for the disk, and use the hit in host memory when their time is over."""

from __future__ import annotations

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens


def waits(world: World) -> list[tuple[str, str, float]]:
    return [call for call in world.session.calls if call[0] == "wait"]


def test_blocking_lookup_waits_for_the_disk():
    world = World(lookup="blocking", lookup_timeout_ms=40)
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    world.session.delivers = True
    request = Request("b", [*prefix, 1])
    assert world.connector.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    [(_, name, waited)] = waits(world)
    assert (name, waited) == ("b", pytest.approx(0.04))
    assert world.counts.collect()["counters"]["lookups_disk"] == 1


def test_blocking_lookup_that_runs_out_of_time_loads_nothing():
    world = World(lookup="blocking")
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    request = Request("b", [*prefix, 1])
    world.counts.collect()
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    # It is asked again where no device blocks are free, and does not wait again.
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert [call[0] for call in world.session.calls].count("wait") == 1
    assert world.counts.collect()["counters"] == {"lookups_timed_out": 1}


def test_a_blocking_lookup_that_times_out_loads_the_part_in_host_memory(caplog):
    world = World(lookup="blocking", lookup_timeout_ms=40)
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    in_host = 3
    payloads = list(world.session.host)
    world.session.disk.update(payloads[in_host:])
    world.counts.collect()
    for name in ("b", "c"):
        world.step()
        request = Request(name, [*prefix, 1])
        assert world.connector.get_num_new_matched_tokens(request, 0) == (in_host * BLOCK, True)
    world.admit(request, external=in_host * BLOCK)
    world.answer(world.step())
    counters = world.counts.collect()["counters"]
    assert counters["lookups_timed_out"] == 2
    assert not {"lookups_miss", "lookups_host", "lookups_disk"} & counters.keys()
    assert [record.message for record in caplog.records] == [
        "undercroft: a blocking lookup reached lookup_timeout_ms (40): the hit ends with the part in host memory"
    ]


class Clock:
    """Time passes only while the scheduler waits, and as long as a test says."""

    def __init__(self, world: World) -> None:
        self.now = 100.0
        self.waited = 0.0
        waits_for_nothing = world.session.wait

        def wait(name: str, timeout_s: float) -> bool:
            answered = waits_for_nothing(name, timeout_s)
            self.now += 0 if answered else timeout_s
            self.waited += 0 if answered else timeout_s
            return answered

        world.session.wait = wait
        world.connector.lookups.blocking._clock = lambda: self.now


def test_all_blocking_lookups_of_one_pass_wait_for_one_timeout_together():
    world = World(lookup="blocking", lookup_timeout_ms=50)
    prompts = [tokens(4 * BLOCK, seed=seed) for seed in range(32)]
    for index, prefix in enumerate(prompts):
        world.prefill(Request(f"a{index}", prefix))
    world.session.lower()
    world.counts.collect()
    clock = Clock(world)
    requests = [Request(f"b{index}", [*prefix, 1]) for index, prefix in enumerate(prompts)]
    answers = [world.connector.get_num_new_matched_tokens(request, 0) for request in requests]
    assert answers == [(0, False)] + [(None, False)] * 31, "those whose own time is not over are asked again"
    assert clock.waited == pytest.approx(0.05)
    world.step()
    # The step between two passes counts as waiting: the disk has read meanwhile.
    clock.now += 0.03
    answers = [world.connector.get_num_new_matched_tokens(request, 0) for request in requests]
    assert answers == [(0, False)] * 32
    assert clock.waited == pytest.approx(0.07)
    assert world.counts.collect()["counters"] == {"lookups_timed_out": 32}


def test_a_later_request_of_a_pass_hits_blocks_that_were_promoted_meanwhile():
    world = World(lookup="blocking", lookup_timeout_ms=50)
    prompts = [tokens(4 * BLOCK, seed=seed) for seed in range(2)]
    for index, prefix in enumerate(prompts):
        world.prefill(Request(f"a{index}", prefix))
    world.session.lower()
    Clock(world)
    first, second = (Request(f"b{index}", [*prefix, 1]) for index, prefix in enumerate(prompts))
    assert world.connector.get_num_new_matched_tokens(first, 0) == (0, False)
    assert world.connector.get_num_new_matched_tokens(second, 0) == (None, False)
    world.session.promote()
    world.step()
    assert world.connector.get_num_new_matched_tokens(second, 0) == (4 * BLOCK, True)
    assert len(waits(world)) == 1
