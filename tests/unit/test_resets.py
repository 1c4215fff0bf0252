"""Resets: dropped when the weights may be others, and kept when they are the same."""

from __future__ import annotations

import logging

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft import log
from undercroft.connector.resets import Resets


@pytest.fixture
def world() -> World:
    """A connector with two blocks saved."""
    world = World()
    world.prefill(Request("a", tokens(2 * BLOCK)))
    assert len(world.session.host) == 2
    return world


def test_a_reset_of_vllms_prefix_cache_alone_keeps_the_tiers_and_is_warned_of_once(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.logger, "propagate", True)
    resets = Resets(world.connector, with_prefix_cache=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            resets.prefix_cache_is_reset()
    assert len(world.session.host) == 2
    assert len([one for one in caplog.records if "reset_with_prefix_cache" in one.getMessage()]) == 1


def test_the_option_drops_the_tiers_with_it_and_at_each_sleep(world: World) -> None:
    resets = Resets(world.connector, with_prefix_cache=True)
    resets.prefix_cache_is_reset()
    assert not world.session.host
    world.prefill(Request("b", tokens(2 * BLOCK)))
    resets.sleeps(weights_stay=True)
    assert resets.reset_cache() is True
    assert not world.session.host


def test_a_reset_after_a_call_that_may_change_weights_drops_the_tiers_once(world: World) -> None:
    resets = Resets(world.connector, with_prefix_cache=False)
    resets.weights_may_change(is_paused=False)
    resets.prefix_cache_is_reset()
    assert not world.session.host
    world.prefill(Request("b", tokens(2 * BLOCK)))
    resets.prefix_cache_is_reset()
    assert len(world.session.host) == 2


def test_a_sleep_with_the_same_weights_keeps_the_tiers_and_forgets_the_device(world: World) -> None:
    resets = Resets(world.connector, with_prefix_cache=False)
    running = Request("r", tokens(2 * BLOCK, seed=4))
    world.connector.on_new_request(running)
    world.connector.get_num_new_matched_tokens(running, 0)
    world.admit(running)
    resets.sleeps(weights_stay=True)
    assert resets.reset_cache() is True
    assert len(world.session.host) == 2
    # The device's memory is gone.
    assert not world.step([(running, 2 * BLOCK)]).saves
    # Only that reset is the sleep's.
    resets.reset_cache()
    assert not world.session.host


@pytest.mark.parametrize("when", ["before", "between", "asleep"])
def test_a_sleep_around_a_call_that_may_change_weights_drops_the_tiers(world: World, when: str) -> None:
    resets = Resets(world.connector, with_prefix_cache=False)
    if when == "before":
        resets.weights_may_change(is_paused=False)
    resets.sleeps(weights_stay=True)
    if when == "between":
        # The sleep waits for requests to end.
        resets.weights_may_change(is_paused=True)
    resets.reset_cache()
    if when == "asleep":
        assert len(world.session.host) == 2
        resets.weights_may_change(is_paused=True)
    assert not world.session.host


def test_a_deeper_sleep_drops_the_tiers(world: World) -> None:
    resets = Resets(world.connector, with_prefix_cache=False)
    resets.sleeps(weights_stay=False)
    resets.reset_cache()
    assert not world.session.host
