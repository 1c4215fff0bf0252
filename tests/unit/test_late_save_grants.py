"""Saves whose slots come later, as from a server: the source blocks keep their bytes until then."""

from __future__ import annotations

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft.connector.scheduler import saves


def asked(world: World, blocks: int = 2) -> Request:
    """A request whose prefill has been scheduled, and whose save waits for its slots."""
    world.session.is_slow = True
    request = Request("a", tokens(blocks * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    meta = world.step([(request, blocks * BLOCK)])
    assert meta.saves == []
    return request


def test_blocks_are_held_from_the_question_to_the_acknowledgement():
    world = World()
    request = asked(world)
    table = list(world.tables["a"][0])
    assert [world.pool.blocks[block].ref_cnt for block in table] == [2, 2]
    world.finish(request)
    assert [world.pool.blocks[block].ref_cnt for block in table] == [1, 1]
    assert world.connector.has_pending_push_work()
    assert world.connector.has_pending_block_frees()
    world.session.is_slow = False
    meta = world.step()
    (job,) = meta.saves
    assert job.groups[0].block_ids.tolist() == table
    assert [world.pool.blocks[block].ref_cnt for block in table] == [1, 1]
    world.answer(meta)
    assert sorted(world.pool.freed) == sorted(table)
    assert len(world.session.host) == 2
    assert not world.connector.has_pending_push_work()


def test_a_late_save_copies_the_block_table_from_the_time_of_its_request():
    world = World()
    asked(world)
    table = list(world.tables["a"][0])
    # Preempted: the request's list of blocks is another one now.
    world.tables["a"][0][:] = [0, 0]
    world.session.is_slow = False
    (job,) = world.step().saves
    assert job.groups[0].block_ids.tolist() == table


def test_only_new_blocks_are_held_for_a_save_that_continues():
    world = World()
    request = Request("a", tokens(4 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    world.answer(world.step([(request, 2 * BLOCK)]))
    world.session.is_slow = True
    world.step([(request, 2 * BLOCK)])
    assert [world.pool.blocks[block].ref_cnt for block in world.tables["a"][0]] == [1, 1, 2, 2]


def test_blocks_that_the_device_had_before_the_request_are_not_held_for_its_save():
    world = World()
    request = Request("a", tokens(4 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 2 * BLOCK)
    request.num_computed_tokens = 2 * BLOCK
    world.admit(request)
    world.session.is_slow = True
    world.step([(request, 2 * BLOCK)])
    assert [world.pool.blocks[block].ref_cnt for block in world.tables["a"][0]] == [1, 1, 2, 2]


def test_blocks_that_a_load_brought_are_not_held_for_the_save():
    world = World()
    world.prefill(Request("a", tokens(2 * BLOCK)))
    request = Request("b", tokens(4 * BLOCK))
    world.connector.on_new_request(request)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (2 * BLOCK, True)
    world.admit(request, external=2 * BLOCK)
    world.answer(world.step())
    request.num_computed_tokens = 2 * BLOCK
    world.session.is_slow = True
    world.step([(request, 2 * BLOCK)])
    assert [world.pool.blocks[block].ref_cnt for block in world.tables["b"][0]] == [1, 1, 2, 2]


def test_slots_for_blocks_that_were_not_held_are_given_back_and_asked_for_again():
    world = World()
    request = Request("a", tokens(4 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    world.answer(world.step([(request, 2 * BLOCK)]))
    world.session.host.clear()  # evicted meanwhile
    world.session.is_slow = True
    world.step([(request, 2 * BLOCK)])
    world.session.is_slow = False
    assert world.step().saves == []
    assert world.session.reserved == {}
    assert [world.pool.blocks[block].ref_cnt for block in world.tables["a"][0]] == [1, 1, 1, 1]
    [(_, _, reason)] = [call for call in world.session.calls if call[0] == "give_up"]
    assert reason == "retry", "no save has failed"
    request.append(*tokens(1))
    jobs = [job for _ in range(8) for job in world.step([(request, 0)]).saves]
    assert [len(job.groups[0].offsets) for job in jobs] == [4]


def test_a_reset_lets_go_at_once_and_the_slots_are_given_back():
    world = World()
    asked(world)
    world.connector.saves.abandon()
    assert [world.pool.blocks[block].ref_cnt for block in world.tables["a"][0]] == [1, 1]
    world.session.is_slow = False
    assert world.step().saves == []
    assert world.session.reserved == {}


def test_a_save_that_is_dropped_before_its_grant_does_not_count_as_saved():
    world = World()
    asked(world)
    world.connector.saves.invalidate(set(world.tables["a"][0]))
    world.session.is_slow = False
    assert world.step().saves == []
    saving = world.connector.requests["a"].saving
    assert (saving.saved_tokens, saving.windows_kept) == (0, 0)


def test_a_server_that_does_not_answer_keeps_no_blocks(monkeypatch: pytest.MonkeyPatch):
    world = World()
    asked(world)
    monkeypatch.setattr(saves.time, "monotonic", lambda: 1e12)
    assert world.step().saves == []
    assert [world.pool.blocks[block].ref_cnt for block in world.tables["a"][0]] == [1, 1]
    assert not world.connector.has_pending_push_work()
    # The answer that comes after all is not used.
    world.session.saves = {grant.transfer_id: [] for grant in world.session.granted}
    world.session.is_slow = False
    assert world.step().saves == []


def test_without_a_server_nothing_is_held_and_it_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    world = World()
    begin = world.session.begin_save
    monkeypatch.setattr(world.session, "begin_save", lambda *args, **more: None)
    request = Request("a", tokens(2 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    assert world.step([(request, 2 * BLOCK)]).saves == []
    assert [world.pool.blocks[block].ref_cnt for block in world.tables["a"][0]] == [1, 1]
    monkeypatch.setattr(world.session, "begin_save", begin)
    jobs = [job for _ in range(8) for job in world.step([(request, 0)]).saves]
    assert [len(job.groups[0].offsets) for job in jobs] == [2]
    assert world.errors == []


def test_slots_that_came_too_late_are_asked_for_again(monkeypatch):
    world = World(server_timeout_ms=30_000)
    now = [100.0]
    monkeypatch.setattr(saves.time, "monotonic", lambda: now[0])
    world.session.is_slow = True
    request = Request("r", tokens(2 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    world.step([(request, 2 * BLOCK)])
    now[0] += 29.0
    world.step()
    assert world.connector.has_pending_push_work(), "as patient as with every other answer"
    now[0] += 2.0
    world.step()
    assert not world.connector.has_pending_push_work()
    world.session.is_slow = False
    request.append(*tokens(1))
    jobs = [job for _ in range(8) for job in world.step([(request, 0)]).saves]
    assert [len(job.groups[0].offsets) for job in jobs] == [2]


def test_grants_are_asked_for_while_one_may_come(monkeypatch: pytest.MonkeyPatch):
    """Also after the save was given up: its slots must go back."""
    world, polls = World(), []
    poll = world.session.poll_saves
    monkeypatch.setattr(world.session, "poll_saves", lambda: polls.append(None) or poll())
    world.step()
    assert polls == [], "nothing was asked for"
    asked(world)
    world.step()
    assert len(polls) == 1
    monkeypatch.setattr(saves.time, "monotonic", lambda: 1e12)
    world.step()
    assert len(world.connector.saves) == 0
    world.step()
    assert len(polls) == 3
