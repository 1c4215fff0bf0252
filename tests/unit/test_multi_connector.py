"""Beside another connector (MultiConnector): tokens that it loads do not count as computed before they are loaded."""

from __future__ import annotations

import pytest

from fake_vllm import BLOCK, Request, scheduler_output
from scheduler_world import World, tokens


def test_blocks_that_another_connector_was_loading_at_an_abort_are_not_saved():
    """vLLM counts the tokens of a load as computed from its beginning."""
    world = World()
    request = Request("r", tokens(3 * BLOCK + 1))
    world.connector.on_new_request(request)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    world.admit(request, external=0)
    request.num_computed_tokens = 3 * BLOCK
    world.step()
    world.finish(request)
    assert world.step().saves == []
    assert world.session.host == {} and world.session.reserved == {}


def test_a_request_that_has_run_is_saved_as_it_ends():
    world = World()
    request = Request("r", tokens(BLOCK + 1))
    world.prefill(request)
    request.append(*tokens(BLOCK, seed=3))
    request.num_computed_tokens = 2 * BLOCK
    world.tables["r"][0].extend(world.pool.allocate(1))
    world.finish(request)
    assert [len(job.groups[0].offsets) for job in world.step().saves] == [1]


@pytest.mark.parametrize("slow", [False, True])
def test_blocks_that_another_connector_failed_to_load_are_dropped_and_saved_again(slow):
    world = World()
    world.session.is_slow = slow
    request = Request("r", tokens(3 * BLOCK + 1))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request, external=0)
    meta = world.step([(request, request.num_tokens)])
    # The other one's load was synchronous: its blocks count as computed in this step.
    world.answer(meta, invalid_blocks=[world.tables["r"][0][1]])
    request.num_computed_tokens = BLOCK
    world.session.is_slow = False
    if slow:
        assert world.step().saves == []
    assert world.session.host == {}
    world.answer(world.step([(request, 2 * BLOCK + 1)]))
    assert len(world.session.host) == 3
    world.finish(request)
    assert world.connector.idle()


@pytest.mark.parametrize("slow", [False, True])
def test_blocks_computed_after_a_failed_load_of_another_connector_are_dropped(slow):
    """The tiers hold the failed blocks already, so the save copies only the blocks after them."""
    world = World()
    first = Request("first", tokens(2 * BLOCK))
    world.prefill(first)
    world.finish(first)
    request = Request("r", tokens(3 * BLOCK + 1))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request, external=0)
    world.session.is_slow = slow
    request.num_computed_tokens = 2 * BLOCK
    meta = world.step([(request, BLOCK + 1)])
    world.answer(meta, invalid_blocks=[world.tables["r"][0][1]])
    request.num_computed_tokens = BLOCK
    world.session.is_slow = False
    if slow:
        assert world.step().saves == []
    assert len(world.session.host) == 2
    world.answer(world.step([(request, 2 * BLOCK + 1)]))
    assert len(world.session.host) == 3
    world.finish(request)
    assert world.connector.idle()


def test_a_state_that_is_offered_does_not_say_that_the_request_has_run():
    world = World()
    request = Request("r", tokens(3 * BLOCK + 1))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request, external=0)
    request.num_computed_tokens = 3 * BLOCK
    output = scheduler_output({}, world.tables)
    output.kv_connector_block_state.boundary_state_offloads = {"r": [(0, 1, BLOCK)]}
    world.connector.build_connector_meta(output)
    assert not world.connector.requests["r"].ran
