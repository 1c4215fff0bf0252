"""Copies that are refused, or still run when their session or their arena ends."""

from __future__ import annotations

from typing import Any

import pytest

from kv_caches import allocate, block_content
from slow_rank import Attachments, SlowRank
from test_worker import Host, job, meta
from undercroft.connector.metadata import UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.connector.worker.attached import AttachedArena
from undercroft.device.api import Ended
from undercroft.device.cuda import CudaCopier


def test_a_job_that_no_thread_takes_fails_once_and_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SlowRank(monkeypatch, Host())
    one.hooks(meta(saves=[job(1, [1], [0])]))
    one.settle()
    assert one.hooks(meta()) == (set(), set(), UndercroftWorkerMetadata({1: 1}))
    saved, before = one.block(1), one.block(2)

    for thread in one.threads.values():
        thread.refuses = True
    failed = meta(loads=[job(2, [2], [0], "dead")], saves=[job(3, [2], [0])])
    assert one.hooks(failed) == ({"dead"}, {"dead"}, UndercroftWorkerMetadata({3: 1}, {3}))
    for thread in one.threads.values():
        thread.refuses = False

    one.hooks(meta(loads=[job(4, [3], [0], "next"), job(5, [4], [0], "last")]))
    one.settle()
    assert one.hooks(meta()) == ({"next", "last"}, set(), None)
    assert one.hooks(meta()) == (set(), set(), None)
    assert one.block(2) == before, "the failed load has written into a block"
    assert [one.block(3), one.block(4)] == [saved, saved], "the failed save has written into a slot"


def test_the_end_of_an_unknown_job_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SlowRank(monkeypatch, Host())
    one.hooks(meta(saves=[job(1, [1], [0])]))
    one.settle()
    copier = one.worker._copier
    assert isinstance(copier, CudaCopier)
    plain = copier.poll
    monkeypatch.setattr(copier, "poll", lambda: [Ended(99, True, 0.0), *plain()])
    assert one.hooks(meta())[2] == UndercroftWorkerMetadata({1: 1})


def test_caches_that_are_registered_again_are_copied_at_their_new_place(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SlowRank(monkeypatch, Host())
    one.hooks(meta(saves=[job(1, [1], [0])]))
    saved = one.block(1)
    former, before = one.caches, one.block(2)
    one.caches = allocate(one.config)
    one.worker.register_kv_caches(one.caches)
    assert one.hooks(meta())[2] == UndercroftWorkerMetadata({1: 1}), "copies of the former caches still run"
    one.hooks(meta(loads=[job(2, [2], [0])]))
    one.settle()
    assert one.hooks(meta())[:2] == ({"r"}, set())
    assert one.block(2) == saved
    assert block_content(one.config, former, 0, 2) == before, "the former caches are written"


def step(session: int, socket: str = "/a", arena_id: int = 10, **jobs: Any) -> UndercroftMetadata:
    return UndercroftMetadata(socket, arena_id, session, **jobs)


def moved(one: SlowRank) -> bool:
    """Whether the device has run copies, or a lane's thread has queued any."""
    return one.streams.now > 0 or not any(thread.pending for thread in one.threads.values())


def test_a_step_after_a_lost_session_does_not_wait_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    one.hooks(step(1, loads=[job(1, [1], [0], "a", 1)], saves=[job(2, [2], [8192], session=1)]))
    assert one.hooks(step(2)) == (set(), set(), None)
    now = step(2, loads=[job(3, [3], [16384], "b", 2)], saves=[job(4, [4], [24576], session=2)])
    assert one.hooks(now) == (set(), set(), None)
    assert not moved(one), "the step has waited"
    old, new = host.made[("/a", 1)], host.made[("/a", 2)]
    assert old.gone == 0, "the engine would reuse slots that copies still read and write"
    one.settle()
    assert one.hooks(step(2)) == ({"a", "b"}, {"a"}, UndercroftWorkerMetadata({2: 1, 4: 1}, {2}))
    assert (old.gone, new.gone) == (1, 0)
    one.worker.shutdown()
    assert (old.gone, new.gone) == (1, 1)


def test_each_of_several_lost_sessions_is_held_until_its_own_copies_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    for session in (1, 2, 3):
        one.hooks(step(session, saves=[job(session, [session], [8192 * session], session=session)]))
    assert not moved(one)
    attached = [host.made[("/a", session)] for session in (1, 2, 3)]
    one.threads["undercroft-save"].run_one()
    one.streams.settle()
    assert one.hooks(step(3))[2] == UndercroftWorkerMetadata({1: 1}, {1})
    assert [made.gone for made in attached] == [1, 0, 0]
    one.settle()
    assert one.hooks(step(3))[2] == UndercroftWorkerMetadata({2: 1, 3: 1}, {2})
    assert [made.gone for made in attached] == [1, 1, 0]


@pytest.mark.parametrize("why", ["ended", "replaced"])
def test_an_arena_is_released_after_its_last_copy_and_no_step_waits(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    one.hooks(step(1, saves=[job(1, [1], [0], session=1)]))
    one.settle()
    one.hooks(step(1))
    one.streams.now = 0
    one.hooks(step(1, loads=[job(2, [2], [0], "a", 1)], saves=[job(3, [3], [8192], session=1)]))
    old = host.made[("/a", 1)]
    discarded: list[Any] = []
    monkeypatch.setattr(AttachedArena, "discard", lambda arena: discarded.append(arena))
    if why == "ended":
        old.is_served = False
        one.hooks(step(1))
    now = step(2, "/b", 11, loads=[job(4, [4], [0], "b", 2)])
    assert one.hooks(now)[:2] == ({"b"}, {"b"}), "there are no lanes for another copier"
    assert not moved(one), "the step has waited"
    assert (old.gone, discarded) == (0, [])
    one.settle()
    assert one.hooks(step(2, "/b", 11)) == ({"a"}, {"a"}, UndercroftWorkerMetadata({3: 1}, {3}))
    assert old.gone == 1
    assert [arena.mapping for arena in discarded] == [old]
    one.hooks(step(2, "/b", 11, saves=[job(5, [1], [0], session=2)]))
    one.settle()
    assert one.hooks(step(2, "/b", 11))[2] == UndercroftWorkerMetadata({5: 1})


def test_sleep_waits_for_the_copies_of_an_arena_that_is_no_longer_used(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    one.hooks(step(1, saves=[job(1, [1], [0], session=1)]))
    one.hooks(step(2, "/b", 11))
    one.worker.unregister_kv_caches()
    assert not any(queue.work for queue in one.streams.queues[1:]), "copies are still queued on memory that is going"
    assert host.made[("/a", 1)].gone == 1
    assert one.hooks(step(2, "/b", 11))[2] == UndercroftWorkerMetadata({1: 1}, {1})
