"""Resets and changes of the weights: dropped or private when the weights may be others, kept when they are the same."""

from __future__ import annotations

import logging

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft import log
from undercroft.connector.resets import Resets

CALL = "update_weights"


@pytest.fixture
def world() -> World:
    """A connector with two blocks saved."""
    world = World()
    world.prefill(Request("a", tokens(2 * BLOCK)))
    assert len(world.session.host) == 2
    return world


def named(world: World) -> list[str | None]:
    """The namespaces that the session has entered."""
    return [call[1] for call in world.session.calls if call[0] == "change_weights"]


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


def test_a_reset_that_nobody_confirms_lets_vllm_go_on_and_is_warned_of(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.logger, "propagate", True)
    monkeypatch.setattr(world.session, "reset", lambda timeout_s: timeout_s > 1.0)
    assert world.connector.reset_cache() is True
    assert world.connector.origin.is_private
    assert "was not confirmed within 1 s" in caplog.text


def test_a_call_that_may_change_weights_parts_from_the_others_once_and_says_so(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.logger, "propagate", True)
    resets = Resets(world.connector, with_prefix_cache=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            resets.weights_may_change(CALL)
    assert named(world) == [None]
    [told] = [one.getMessage() for one in caplog.records]
    assert told.startswith(f"undercroft: {CALL} may have changed the weights.")


def test_a_reset_after_a_call_that_may_change_weights_drops_the_tiers_once(world: World) -> None:
    resets = Resets(world.connector, with_prefix_cache=False)
    resets.weights_may_change(CALL)
    world.prefill(Request("b", tokens(2 * BLOCK)))
    resets.prefix_cache_is_reset()
    assert not world.session.host
    world.prefill(Request("c", tokens(2 * BLOCK)))
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
        resets.weights_may_change(CALL)
    resets.sleeps(weights_stay=True)
    if when == "between":
        # The sleep waits for requests to end.
        resets.weights_may_change(CALL)
    resets.reset_cache()
    if when == "asleep":
        assert len(world.session.host) == 2
        resets.weights_may_change(CALL)
    assert not world.session.host


def test_a_deeper_sleep_drops_the_tiers(world: World) -> None:
    resets = Resets(world.connector, with_prefix_cache=False)
    resets.sleeps(weights_stay=False)
    resets.reset_cache()
    assert not world.session.host


def test_a_save_under_way_is_given_up_and_its_blocks_are_saved_again(world: World) -> None:
    resets = Resets(world.connector, with_prefix_cache=False)
    running = Request("r", tokens(3 * BLOCK, seed=4))
    world.connector.on_new_request(running)
    world.connector.get_num_new_matched_tokens(running, 0)
    world.admit(running)
    meta = world.step([(running, 2 * BLOCK)])
    [save] = meta.saves
    resets.weights_may_change(CALL)
    world.answer(meta)
    assert ("give_up", save.transfer_id, "weights") in world.session.calls
    assert not world.session.host
    meta = world.step([(running, BLOCK)])
    world.answer(meta)
    assert len(world.session.host) == 3, "the private namespace has the whole chain"


class Versions:
    """Weights with names, and the namespaces that follow."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.resets = Resets(world.connector, with_prefix_cache=False, describe_version=lambda name: f"at {name}")
        self.number = 0

    def computes(self) -> None:
        self.number += 1
        self.world.prefill(Request(f"computed {self.number}", tokens(2 * BLOCK, seed=self.number)))

    def device_reset(self) -> None:
        self.resets.prefix_cache_is_reset()
        self.resets.device_is_reset()

    def namespaces(self) -> list[str | None]:
        return named(self.world)


@pytest.fixture
def versions(world: World) -> Versions:
    return Versions(world)


def test_named_weights_are_shared_when_the_device_holds_nothing_of_others(versions: Versions) -> None:
    versions.resets.weights_may_change(CALL)
    versions.resets.weights_are_named("1")
    versions.computes()
    assert versions.namespaces() == [None], "the device holds KV from before the change"
    versions.device_reset()
    assert versions.namespaces() == [None, "at 1"]


def test_weights_that_are_named_after_a_reset_are_shared_at_once(versions: Versions) -> None:
    versions.device_reset()
    versions.resets.weights_may_change(CALL)
    versions.resets.weights_are_named("1")
    versions.computes()
    assert versions.namespaces() == [None, "at 1"]


def test_a_step_during_the_change_makes_the_device_mixed(versions: Versions) -> None:
    versions.device_reset()
    versions.resets.weights_may_change("start_weight_update")
    versions.computes()
    versions.resets.weights_may_change("finish_weight_update")
    versions.resets.weights_are_named("1")
    assert versions.namespaces() == [None]


def test_a_load_from_a_private_namespace_makes_the_device_mixed(versions: Versions) -> None:
    world = versions.world
    versions.resets.weights_may_change(CALL)
    first = Request("first", tokens(3 * BLOCK, seed=9))
    world.prefill(first)
    versions.resets.device_is_reset()
    versions.resets.weights_may_change(CALL)
    again = Request("again", tokens(3 * BLOCK, seed=9))
    world.connector.on_new_request(again)
    found, _ = world.connector.get_num_new_matched_tokens(again, 0)
    assert found
    world.admit(again, found)
    versions.resets.weights_are_named("1")
    assert versions.namespaces() == [None]


def test_each_change_ends_the_name_and_a_reset_keeps_named_blocks(versions: Versions) -> None:
    assert versions.resets.reset_cache() is True
    assert len(versions.world.session.host) == 2, "the weights of the start have a name, too"
    versions.device_reset()
    for step in ("1", "2"):
        versions.resets.weights_may_change(CALL)
        versions.resets.weights_are_named(step)
        versions.computes()
        kept = len(versions.world.session.host)
        versions.device_reset()
        assert versions.resets.reset_cache() is True
        assert len(versions.world.session.host) == kept > 0
    assert versions.namespaces() == [None, "at 1", None, "at 2"]


def test_without_the_option_a_name_shares_nothing(world: World) -> None:
    resets = Resets(world.connector, with_prefix_cache=False)
    resets.weights_may_change(CALL)
    resets.weights_are_named("1")
    resets.device_is_reset()
    assert named(world) == [None]
