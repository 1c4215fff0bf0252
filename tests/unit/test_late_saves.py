"""Saves that no worker ends: vLLM gets its device blocks back, and no bytes of such a save are ever served."""

from __future__ import annotations

import pytest

from fake_vllm import BLOCK, Request, scheduler_output
from scheduler_world import World, tokens
from undercroft.connector.scheduler import saves


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(saves.time, "monotonic", lambda: now[0])
    return now


def begun(world: World, name: str, seed: int = 0) -> object:
    """The metadata with the save of a request that has finished."""
    request = Request(name, tokens(2 * BLOCK, seed))
    world.connector.on_new_request(request)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    world.admit(request)
    meta = world.step([(request, 2 * BLOCK)])
    world.finish(request)
    return meta


def pass_by(world: World, now: list[float], steps: int = saves.SAVE_TIMEOUT_STEPS) -> list[object]:
    """The time in which a worker must end a save, over so many steps."""
    now[0] += saves.SAVE_TIMEOUT_S
    return [world.step() for _ in range(steps)]


def is_served(world: World, name: str, seed: int = 0) -> bool:
    request = Request(name, tokens(2 * BLOCK + 1, seed))
    world.connector.on_new_request(request)
    hit = world.connector.get_num_new_matched_tokens(request, 0)
    world.connector.request_finished(request, ([],))
    return hit != (0, False)


def test_a_save_that_no_worker_ends_keeps_no_block_and_asks_for_no_step(now):
    world = World()
    late = begun(world, "a")
    assert world.connector.has_pending_push_work() and world.connector.has_pending_block_frees()
    pass_by(world, now)
    assert world.pool.reset_prefix_cache(), "a device block is still referenced"
    assert not world.connector.has_pending_push_work()
    assert not world.connector.has_pending_block_frees()
    assert world.connector.idle()
    ((hook, error),) = world.errors
    assert hook == "build_connector_meta"
    assert "within 60 s: 1." in str(error)
    # A worker may still write to the slots, so they stay taken until it has ended the copy.
    assert len(world.session.reserved) == 2
    world.answer(late)
    assert world.session.reserved == {}
    assert not is_served(world, "again"), "its device blocks may have had other bytes"


def test_a_failed_rank_does_not_end_a_late_save_for_the_others(now):
    world = World(ranks=2)
    late = begun(world, "a")
    pass_by(world, now)
    world.ranks = 1
    world.answer(late, failed_saves=[late.saves[0].transfer_id])
    assert len(world.session.reserved) == 2
    world.answer(late)
    assert world.session.reserved == {}


def test_time_in_which_vllm_runs_no_step_does_not_count(now):
    world = World()
    meta = begun(world, "a")
    pass_by(world, now, saves.SAVE_TIMEOUT_STEPS - 2)
    assert world.connector.has_pending_push_work()
    world.answer(meta)
    assert is_served(world, "again")
    assert world.errors == []


def test_while_no_save_ends_only_one_save_at_a_time_holds_blocks(now):
    world = World()
    late = begun(world, "a")
    pass_by(world, now)
    tried = begun(world, "b", 1)
    assert tried.saves, "the workers may have recovered"
    assert begun(world, "c", 2).saves == []
    world.answer(tried)
    assert is_served(world, "again", 1)
    both = [begun(world, "d", 3), begun(world, "e", 4)]
    assert all(meta.saves for meta in both), "the workers have recovered"
    world.answer(late)


def test_an_engine_that_cannot_be_asked_for_slots_keeps_no_block(now, monkeypatch):
    world = World()
    world.session.is_slow = True
    assert begun(world, "a").saves == []
    assert world.connector.has_pending_push_work()

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(world.session, "poll_saves", broken)
    monkeypatch.setattr(world.session, "end_transfer", broken)
    now[0] += saves.GRANT_TIMEOUT_S + 1
    world.step()
    assert not world.connector.has_pending_push_work()
    assert world.pool.reset_prefix_cache(), "a device block is still referenced"


def test_slots_that_cannot_be_given_back_keep_no_block(now, monkeypatch):
    world = World()
    world.session.is_slow = True
    begun(world, "a")
    world.connector.forget_device()  # the grant is of no use any more
    begun(world, "b", 1)

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(world.session, "end_transfer", broken)
    world.session.is_slow = False
    meta = world.step()
    assert [job.request_id for job in meta.saves] == ["b"], "the error of one save loses no other"
    world.connector.build_connector_meta(scheduler_output({}, {}))
    world.answer(meta)
    assert world.pool.reset_prefix_cache(), "a device block is still referenced"
