"""Steps in which nothing begins: the message of the workers, and lookups that wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft.connector.scheduler import next_metadata


def test_steps_without_jobs_share_a_message_that_never_gets_a_job():
    """An earlier step's worker may still read it when a later step has a job."""
    world = World()
    idle = [world.step() for _ in range(2)]
    assert idle[0] is idle[1]
    busy = world.prefill(Request("a", tokens(2 * BLOCK)))
    assert busy.saves and busy is not idle[0]
    assert not idle[0].saves
    assert world.step() is idle[0]


def address(socket, arena_id, session):
    return SimpleNamespace(socket=socket, arena_id=arena_id, session=session)


def test_a_new_address_comes_with_the_next_job_and_soon_without_jobs():
    world = World()
    world.step()
    world.engine.arena = address("/other.sock", 8, 3)
    assert world.step().arena_id == 7
    busy = world.prefill(Request("a", tokens(2 * BLOCK)))
    assert (busy.arena_socket, busy.arena_id, busy.arena_session) == ("/other.sock", 8, 3)
    assert world.step().arena_id == 8
    world.engine.arena = address("/third.sock", 9, 4)
    assert 9 in [world.step().arena_id for _ in range(next_metadata.LOOK_STEPS)]


def test_a_request_that_waits_asks_the_core_once_a_step_and_anew_from_other_tokens(monkeypatch):
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    request = Request("b", [*prefix, 1])
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    monkeypatch.setattr(world.connector.lookups, "_look_up", lambda *_: pytest.fail("the arguments are known"))
    begin = len(world.session.calls)
    for _ in range(3):
        assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert world.session.calls[begin:] == [("lookup", "b", 0, 4 * BLOCK)] * 3
    monkeypatch.undo()
    # Another request has computed two blocks of the prefix meanwhile.
    assert world.connector.get_num_new_matched_tokens(request, 2 * BLOCK) == (None, False)
    assert world.session.calls[-1] == ("lookup", "b", 2 * BLOCK, 4 * BLOCK)
    world.session.promote()
    begin = len(world.session.calls)
    assert world.connector.get_num_new_matched_tokens(request, 2 * BLOCK) == (2 * BLOCK, True)
    assert len(world.session.calls) == begin + 1, "the answer is not asked for again"
