"""Steps in which nothing begins: the message of the workers, and lookups that wait."""

from __future__ import annotations

from types import SimpleNamespace

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
