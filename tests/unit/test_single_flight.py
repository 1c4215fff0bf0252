"""Requests whose next block another request loads wait for that load, and for nothing else."""

from __future__ import annotations

from types import SimpleNamespace

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft.connector.groups import Groups
from undercroft.connector.scheduler import lookups as module
from undercroft.connector.scheduler.single_flight import SingleFlight

PREFIX = tokens(4 * BLOCK)


def loading(world, name="first", ids=PREFIX):
    """A request whose load has begun."""
    request = Request(name, [*ids, 1])
    assert ask(world, request) == (len(ids), True)
    world.admit(request, external=len(ids))
    return request


def ask(world, request, computed=0):
    return world.connector.get_num_new_matched_tokens(request, computed)


def saved(*prompts):
    world = World()
    for number, ids in enumerate(prompts):
        world.prefill(Request(f"saved {number}", ids))
    world.counts.collect()
    return world


def test_a_request_waits_for_the_load_of_its_prefix_and_hits_on_the_device():
    world = saved(PREFIX)
    loading(world)
    second = Request("second", [*PREFIX, 2])
    assert ask(world, second) == (None, False)
    assert ask(world, second) == (None, False)
    world.answer(world.step())
    # vLLM has cached the loaded blocks.
    assert ask(world, second, 4 * BLOCK) == (0, False)
    counters = world.counts.collect()["counters"]
    assert {name: count for name, count in counters.items() if "lookups" in name} == {
        "lookups_host": 1,
        "lookups_on_device": 1,
    }


def test_a_request_loads_the_blocks_behind_the_shared_part_afterwards():
    longer = [*PREFIX, *tokens(2 * BLOCK, 7)]
    world = saved(longer)
    loading(world)
    second = Request("second", [*longer, 2])
    assert ask(world, second) == (None, False)
    world.answer(world.step())
    assert ask(world, second, 4 * BLOCK) == (2 * BLOCK, True)


def test_other_prompts_do_not_wait():
    other = tokens(4 * BLOCK, 3)
    world = saved(PREFIX, other)
    loading(world)
    assert ask(world, Request("other", [*other, 1])) == (4 * BLOCK, True)
    assert ask(world, Request("unknown", tokens(4 * BLOCK, 5))) == (0, False)


def test_a_request_whose_device_blocks_end_inside_the_load_waits_too():
    world = saved(PREFIX)
    loading(world)
    assert ask(world, Request("second", [*PREFIX, 2]), BLOCK) == (None, False)


def test_after_a_failed_load_the_next_request_loads():
    world = saved(PREFIX)
    loading(world)
    second, third = Request("second", [*PREFIX, 2]), Request("third", [*PREFIX, 3])
    assert ask(world, second) == ask(world, third) == (None, False)
    world.answer(world.step(), failed_loads={"first"})
    assert ask(world, second) == (4 * BLOCK, True)
    world.admit(second, external=4 * BLOCK)
    assert ask(world, third) == (None, False)


def test_nobody_waits_for_the_load_of_an_aborted_request():
    world = saved(PREFIX)
    first = loading(world)
    second = Request("second", [*PREFIX, 2])
    assert ask(world, second) == (None, False)
    world.finish(first)
    assert ask(world, second) == (4 * BLOCK, True)
    world.admit(second, external=4 * BLOCK)
    # The report of the aborted load does not end the wait for the second.
    meta = world.step()
    meta.loads = [job for job in meta.loads if job.request_id == "first"]
    world.answer(meta)
    assert ask(world, Request("third", [*PREFIX, 3])) == (None, False)


def test_the_wait_for_a_load_that_hangs_ends(monkeypatch):
    world = saved(PREFIX)
    loading(world)
    second = Request("second", [*PREFIX, 2])
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert ask(world, second) == (None, False)
    now[0] = module.LOAD_WAIT_S + 1
    assert ask(world, second) == (4 * BLOCK, True)


def test_with_states_a_request_waits_only_for_a_load_that_ends_inside_its_prompt():
    hashes = [bytes([number]) for number in range(8)]
    other = [*hashes[:5], *(bytes([100 + number]) for number in range(3))]
    flight = SingleFlight(any_part=False)
    flight.begin("first", hashes, 0, 4)
    assert flight.fills("same", hashes, 0, 4)
    assert flight.fills("longer", other, 0, 8)
    assert not flight.fills("shorter", hashes, 0, 3)
    flight.begin("first", hashes, 0, 6)
    # They share five blocks, and the state at the end of the sixth is another one.
    assert not flight.fills("other", other, 0, 8)
    assert SingleFlight(any_part=True).fills("other", other, 0, 8) is False
    flight.end("first")
    assert not flight.fills("same", hashes, 0, 4)


def test_a_load_within_the_windows_is_shared_by_prompts_that_part_inside_it():
    hashes = [bytes([number]) for number in range(8)]
    other = [*hashes[:2], *(bytes([100 + number]) for number in range(6))]
    flight = SingleFlight(any_part=False, whole_blocks=3)
    flight.begin("short", hashes, 0, 3)
    assert flight.fills("other", other, 0, 8)
    flight.begin("short", hashes, 0, 4)
    assert not flight.fills("other", other, 0, 8)


def test_how_many_blocks_a_load_brings_of_every_window():
    def blocks(kinds, windows, sizes=(BLOCK, BLOCK)):
        return Groups(BLOCK, BLOCK, kinds, sizes, windows, 0).window_blocks

    assert blocks(("full", "sliding_window"), (0, 4 * BLOCK)) == 4
    assert blocks(("full", "sliding_window"), (0, 4 * BLOCK + 1)) == 4
    assert blocks(("full", "sliding_window"), (0, 4 * BLOCK + 2)) == 5
    assert blocks(("full", "full"), (0, 0)) == 0
    assert blocks(("full", "state"), (0, 0)) == 0
    assert blocks(("full", "chunked_local"), (0, 4 * BLOCK)) == 0
    assert blocks(("full", "sliding_window"), (0, 4 * BLOCK), (2 * BLOCK, BLOCK)) == 0


def test_the_end_of_one_of_two_loads_of_a_block_leaves_the_other():
    hashes = [b"a", b"b"]
    flight = SingleFlight(any_part=True)
    flight.begin("first", hashes, 0, 2)
    flight.begin("second", hashes, 0, 2)
    flight.end("first")
    assert flight.fills("third", hashes, 0, 2)
    assert not flight.fills("second", hashes, 0, 2)
    flight.end("second")
    flight.end("second")
    assert not flight.fills("third", hashes, 0, 2)


def test_a_load_of_a_tail_alone_makes_nobody_wait():
    flight = SingleFlight(any_part=True)
    flight.begin("first", [b"a"], 1, 1)
    assert not flight.fills("second", [b"a"], 1, 1)


def test_groups_of_full_attention_alone_share_any_part_of_a_load():
    assert World().connector._single_flight.any_part
    states = Groups(BLOCK, BLOCK, ("full", "state"), (BLOCK, BLOCK), (0, 0), 0)
    assert not World(states).connector._single_flight.any_part
