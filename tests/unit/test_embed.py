"""`undercroft.embed`: what a program of its own gets from a cache, and what it is spared."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_process import ServeProcess
from served_client import until
from undercroft.embed import Blocks, Cache, Group, Job, chain
from undercroft.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 16
SIZE = 4096
HOST = {"host_memory": "16MiB"}


def content(seed: int, count: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE), dtype=np.uint8)


class Pool:
    """A program's memory: rows of one block each."""

    def __init__(self, cache: Cache, rows: int = 64) -> None:
        self.rows = np.zeros((rows, SIZE), np.uint8)
        self._address = cache.add_region(self.rows)

    def blocks(self, first: int, count: int, row: int = 0, group: int = 0) -> Blocks:
        """``count`` blocks from number ``first`` on, in the rows from ``row`` on."""
        return Blocks(group, np.arange(first, first + count), self._address + np.arange(row, row + count) * SIZE)


def keys(seed: int, count: int) -> list[bytes]:
    return chain(bytes([seed, number % 256]) for number in range(count))


@contextlib.contextmanager
def on_a_server(server: ServeProcess, **options: Any) -> Iterator[Cache]:
    found = {"server": f"unix://{server.socket}", **options}
    with Cache.open(found, {"test": 1}, [Group((SIZE,))], TOKENS) as cache:
        yield cache


@contextlib.contextmanager
def a_reply_due(server: ServeProcess, cache: Cache, for_s: float | None = 0.2) -> Iterator[None]:
    """For a while the server replies to nothing, and an earlier question waits for its reply already. ``for_s``: None
    until the end."""
    server.process.send_signal(signal.SIGSTOP)
    assert cache.exists(keys(2, 1), timeout_s=0.02) == 0
    end = threading.Timer(for_s or 0.0, server.process.send_signal, [signal.SIGCONT])
    if for_s is not None:
        end.start()
    try:
        yield
    finally:
        if for_s is None:
            end.start()
        end.join()


@contextlib.contextmanager
def opened(options: dict[str, Any], groups: list[Group] | None = None, identity: Any = None) -> Iterator[Cache]:
    with Cache.open(HOST | options, identity or {"test": 1}, groups or [Group((SIZE,))], TOKENS) as cache:
        yield cache


def on_disk(path: Path) -> dict[str, Any]:
    return {"disk_path": str(path / "cache"), "disk_capacity": "64MiB"}


def test_saved_blocks_come_back_and_survive_a_restart(tmp_path: Path) -> None:
    wanted = content(1, 20)
    with opened(on_disk(tmp_path)) as cache:
        pool = Pool(cache)
        assert cache.exists(keys(1, 20)) == 0
        pool.rows[:20] = wanted
        saved = cache.save(keys(1, 20), [pool.blocks(0, 20)])
        assert (saved.complete, saved.copied_bytes) == (True, 20 * SIZE)
        assert cache.exists(keys(1, 24)) == 20 * TOKENS
        assert cache.save(keys(1, 20), [pool.blocks(0, 20)]).copied_bytes == 0, "the cache has them"
        assert cache.engine.flush()
    with opened(on_disk(tmp_path)) as cache:
        pool = Pool(cache)
        loaded = cache.load(keys(1, 24), [pool.blocks(0, 24)])
        assert not loaded.complete
        assert loaded.done == {0: frozenset(range(20))}
        assert (pool.rows[:20] == wanted).all()
        assert not pool.rows[20:].any(), "nothing is written where nothing was found"
        part = cache.load(keys(1, 20), [pool.blocks(12, 8, row=40)], begin=12 * TOKENS)
        assert part.complete
        assert (pool.rows[40:48] == wanted[12:]).all()
        assert cache.stats()["disk_reads"] == 20


def test_calls_that_may_wait_wait_for_a_server_that_replies_late(tmp_path: Path) -> None:
    found = keys(1, 8)
    with ServeProcess(tmp_path / "s") as server, on_a_server(server) as cache:
        pool = Pool(cache)
        pool.rows[:8] = content(1, 8)
        until("the server is connected", lambda: cache.save(found, [pool.blocks(0, 1)]).complete)
        with a_reply_due(server, cache):
            assert cache.save(found, [pool.blocks(0, 8)]).complete
        with a_reply_due(server, cache):
            assert cache.exists(found, timeout_s=5) == 8 * TOKENS
        with a_reply_due(server, cache):
            assert cache.load(found, [pool.blocks(0, 8, row=8)]).complete
        assert np.array_equal(pool.rows[8:16], content(1, 8))


def test_a_program_may_choose_misses_before_late_replies(tmp_path: Path) -> None:
    found = keys(1, 8)
    with ServeProcess(tmp_path / "s") as server, on_a_server(server, server_timeout_ms=5) as cache:
        pool = Pool(cache)
        until("the server is connected", lambda: cache.save(found, [pool.blocks(0, 8)]).complete)
        with a_reply_due(server, cache, for_s=None):
            assert not cache.load(found, [pool.blocks(0, 8)]).complete


def test_other_identities_and_other_chains_are_misses(tmp_path: Path) -> None:
    with opened(on_disk(tmp_path)) as cache:
        pool = Pool(cache)
        assert cache.save(keys(1, 4), [pool.blocks(0, 4)]).complete
        assert cache.exists(keys(2, 4)) == 0
        assert cache.exists(chain([bytes([1, 0])], seed=b"tenant")) == 0
        assert cache.load(keys(2, 4), [pool.blocks(0, 4)]).done == {}
        assert cache.engine.flush()
    with opened(on_disk(tmp_path), identity={"test": 2}) as cache:
        assert cache.exists(keys(1, 4)) == 0


def test_a_save_whose_beginning_the_cache_lacks_says_which_blocks() -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        pool.rows[:10] = content(3, 10)
        job = cache.save(keys(3, 10), [pool.blocks(4, 6, row=4)])
        assert (job.complete, job.done, job.lacks) == (False, {}, {0: frozenset(range(4))})
        assert cache.exists(keys(3, 10)) == 0
        assert cache.save(keys(3, 10), [pool.blocks(0, 10)]).complete
        again = cache.load(keys(3, 10), [pool.blocks(0, 10, row=20)])
        assert again.complete
        assert (pool.rows[20:30] == pool.rows[:10]).all()


@pytest.mark.parametrize("left", [0, 1], ids=["all of it", "its end"])
def test_a_piece_whose_prefix_is_evicted_is_refused(left: int) -> None:
    with opened({}) as cache:
        pool = Pool(cache, rows=1024)
        wanted = content(8, 600)
        pool.rows[:600] = wanted
        chain, others = keys(8, 600), itertools.count(100)
        assert cache.save(chain[:512], [pool.blocks(0, 512)]).complete
        while cache.exists(chain) > left * 500 * TOKENS:
            # Blocks go out from the end of a prefix on.
            assert cache.save(keys(next(others), 64), [pool.blocks(0, 64, row=900)]).complete
        held = cache.exists(chain) // TOKENS
        assert (held > 0) == left
        evictions = cache.stats()["host_evictions"]
        piece = cache.save(chain, [pool.blocks(512, 88, row=512)])
        assert (piece.complete, piece.done) == (False, {})
        assert cache.stats()["host_evictions"] == evictions, "what is refused takes nobody's memory"
        assert piece.lacks[0] >= {511}
        assert cache.exists(chain) // TOKENS <= held, "nothing of the piece is kept below what is gone"
        pool.rows[:600] = 0
        got = cache.load(chain, [pool.blocks(0, 600)]).done.get(0, frozenset())
        assert not any((pool.rows[number] != wanted[number]).any() for number in got)
        pool.rows[:600] = wanted
        assert cache.save(chain, [pool.blocks(0, 600)]).complete
        pool.rows[:600] = 0
        assert cache.load(chain, [pool.blocks(0, 600)]).complete
        assert (pool.rows[:600] == wanted).all()


@pytest.mark.parametrize("piece", [500, 10_000], ids=["in pieces", "at once"])
def test_a_prompt_larger_than_host_memory_is_kept(piece: int, tmp_path: Path) -> None:
    count, chain = 10_000, keys(9, 10_000)
    wanted = content(9, count)
    with opened(on_disk(tmp_path)) as cache:
        pool = Pool(cache, rows=piece)
        for first in range(0, count, piece):
            pool.rows[:] = wanted[first : first + piece]
            job = cache.save(chain[: first + piece], [pool.blocks(first, piece)], timeout_s=60.0)
            assert job.complete, f"{len(job.done.get(0, ()))} of {piece} blocks from {first} on"
        assert cache.engine.flush(60.0)
    with opened(on_disk(tmp_path)) as cache:
        pool = Pool(cache, rows=piece)
        for first in range(0, count, piece):
            blocks = [pool.blocks(first, piece)]
            assert cache.load(chain[: first + piece], blocks, begin=first * TOKENS, timeout_s=60.0).complete
            assert (pool.rows == wanted[first : first + piece]).all()


def test_several_chains_are_saved_and_asked_for_together() -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        pool.rows[:] = content(7, 64)
        chains = [keys(seed, 4) for seed in range(8)]
        saves = [(one, [pool.blocks(0, 4, row=4 * number)]) for number, one in enumerate(chains)]
        saved = cache.save_each(saves[:6], timeout_s=5.0)
        assert [job.complete for job in saved] == [True] * 6
        assert cache.exists_each([*chains, chains[0][:2]]) == [4 * TOKENS] * 6 + [0, 0, 2 * TOKENS]
        loaded = Pool(cache)
        for number, one in enumerate(chains[:6]):
            assert cache.load(one, [loaded.blocks(0, 4, row=4 * number)]).complete
        assert (loaded.rows[:24] == pool.rows[:24]).all()


def test_a_save_with_a_hole_keeps_the_blocks_before_it() -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        numbers = np.asarray([0, 1, 2, 5, 6])
        job = cache.save(keys(4, 7), [Blocks(0, numbers, pool.blocks(0, 5).addresses)])
        assert (job.complete, job.done, job.lacks) == (False, {0: frozenset({0, 1, 2})}, {0: frozenset({3, 4})})
        assert cache.exists(keys(4, 7)) == 3 * TOKENS


def test_blocks_of_several_parts_lie_anywhere() -> None:
    with opened({}, [Group((1024, 3072))]) as cache:
        heads, tails = np.zeros((8, 1024), np.uint8), np.zeros((8, 3072), np.uint8)
        first, second = cache.add_region(heads), cache.add_region((int(tails.ctypes.data), tails.nbytes))
        whole = content(5, 4)
        heads[:4], tails[:4] = whole[:, :1024], whole[:, 1024:]

        def at(row: int) -> Blocks:
            rows = np.arange(row, row + 4)
            return Blocks(0, np.arange(4), np.stack([first + rows * 1024, second + rows[::-1] * 3072], axis=1))

        assert cache.save(keys(5, 4), [at(0)]).complete
        assert cache.load(keys(5, 4), [at(4)]).complete
        assert (heads[4:] == heads[:4]).all()
        assert (tails[4:] == tails[:4]).all()


def test_windows_and_states_are_brought_where_a_hit_ends() -> None:
    groups = [Group((SIZE,)), Group((SIZE,), "sliding_window", window_tokens=2 * TOKENS + 1), Group((SIZE,), "state")]
    with opened({}, groups) as cache:
        pool = Pool(cache)
        pool.rows[:] = content(6, 64)
        job = cache.save(keys(6, 10), [pool.blocks(0, 10), pool.blocks(6, 2, 10, 1), pool.blocks(7, 1, 12, 2)])
        assert job.complete
        assert cache.exists(keys(6, 10)) == 8 * TOKENS, "the window and the state end there"
        wanted = [pool.blocks(0, 10, 20), pool.blocks(0, 10, 30, 1), pool.blocks(0, 10, 40, 2)]
        loaded = cache.load(keys(6, 10), wanted)
        assert loaded.done == {0: frozenset(range(8)), 1: frozenset({6, 7}), 2: frozenset({7})}
        assert (pool.rows[20:28] == pool.rows[:8]).all()
        assert (pool.rows[36:38] == pool.rows[10:12]).all()
        assert (pool.rows[47] == pool.rows[12]).all()


def test_a_hit_of_one_block_is_a_hit(tmp_path: Path) -> None:
    wanted = content(1, 8)
    with opened(on_disk(tmp_path)) as cache:
        pool = Pool(cache)
        pool.rows[:8] = wanted
        assert cache.save(keys(1, 8), [pool.blocks(0, 8)]).complete
        for first in range(8):
            assert cache.load(keys(1, 8)[: first + 1], [pool.blocks(first, 1, row=20)], begin=first * TOKENS).complete
            assert (pool.rows[20] == wanted[first]).all()


def test_jobs_run_beside_the_caller() -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        pool.rows[:8] = content(7, 8)
        jobs = [cache.begin_save(keys(7, 8), [pool.blocks(0, 8)]), cache.begin_save(keys(8, 2), [pool.blocks(0, 2)])]
        cache.drain()
        ended = cache.poll()
        assert {id(job) for job in ended} == {id(job) for job in jobs}
        assert all(job.complete for job in jobs)
        assert not cache.busy
        found = cache.find("mine", keys(7, 8))
        assert (found.pending, found.tokens) == (False, 8 * TOKENS)
        job = cache.begin_load("mine", [pool.blocks(0, 8, row=8)], begin=0, end=found.tokens)
        cache.drain()
        assert cache.poll() == [job]
        assert job.complete
        cache.forget("mine")
        assert (pool.rows[8:16] == pool.rows[:8]).all()


def test_saves_that_are_given_up_keep_nothing(tmp_path: Path) -> None:
    with opened(on_disk(tmp_path)) as first, opened(on_disk(tmp_path)) as second:
        for cache in (first, second):
            pool = Pool(cache)
            jobs = [cache.begin_save(keys(seed, 8), [pool.blocks(0, 8)]) for seed in (1, 2)]
            assert len(cache._granting) == 2 * (cache is second), "the first one has the engine"
            cache.give_up("weights")
            ended: list[Job] = []
            while cache.busy:
                ended += cache.poll()
            assert {id(job) for job in ended} == {id(job) for job in jobs}
            assert [job.done for job in jobs] == [{}, {}]
            assert not cache.busy
        assert [first.exists(keys(seed, 8)) for seed in (1, 2)] == [0, 0]
        assert first.save(keys(1, 8), [Pool(first).blocks(0, 8)]).complete
        assert second.save(keys(2, 8), [Pool(second).blocks(0, 8)]).complete
        found = first.stats()
        assert (found["given_up_saves_weights"], found["save_failures"]) == (4, 0)


def test_saves_that_wait_for_memory_and_are_given_up_ask_no_more() -> None:
    big = 1 << 20
    with Cache.open({"host_memory": "64MiB"}, {"test": 1}, [Group((big,))], TOKENS) as cache:
        rows = np.zeros((80, big), np.uint8)
        address = cache.add_region(rows)
        job = cache.begin_save(keys(9, 80), [Blocks(0, np.arange(80), address + np.arange(80) * big)], timeout_s=3600)
        while not cache._waiting:
            assert not cache.poll()
        cache.give_up("weights")
        assert cache.poll() == [job]
        assert not cache.busy


class Failing:
    """An object of the engine whose method ``name`` fails ``times`` times."""

    def __init__(self, inner: Any, name: str, times: int = 1) -> None:
        self._inner, self._name, self._times = inner, name, times

    def __getattr__(self, name: str) -> Any:
        if name == self._name and self._times:
            self._times -= 1
            return self._fail
        return getattr(self._inner, name)

    def _fail(self, *_: object) -> None:
        raise RuntimeError(f"no {self._name} today")


def test_copies_that_cannot_start_are_misses_and_hold_nothing() -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        pool.rows[:4] = content(1, 4)
        attachment = cache._attachment
        assert attachment is not None
        cache._attachment = attachment._replace(copier=Failing(attachment.copier, "submit_blocks"))  # type: ignore[arg-type]
        assert cache.save(keys(1, 4), [pool.blocks(0, 4)]).done == {}
        assert cache.save(keys(1, 4), [pool.blocks(0, 4)]).complete
        cache._attachment = attachment._replace(copier=Failing(attachment.copier, "submit_blocks"))  # type: ignore[arg-type]
        assert cache.load(keys(1, 4), [pool.blocks(0, 4, row=8)]).done == {}
        assert cache.load(keys(1, 4), [pool.blocks(0, 4, row=8)]).complete
        found = cache.stats()
        assert (found["loads"], found["saves"], found["active_lookups"]) == (0, 0, 0)
        assert not cache.busy


def test_an_error_in_one_job_ends_this_job_only() -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        jobs = [cache.begin_save(keys(seed, 2), [pool.blocks(0, 2)]) for seed in (1, 2, 3)]
        attachment = cache._attachment
        assert attachment is not None
        attachment.copier.drain()
        cache.session = Failing(cache.session, "end_transfer")  # type: ignore[assignment]
        assert set(map(id, cache.poll())) == set(map(id, jobs))
        assert sorted(job.complete for job in jobs) == [False, True, True]
        assert not cache.busy
        assert cache.stats()["saves"] == 0


class Noting:
    """An object of the engine that notes the calls of its methods."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.calls = inner, []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._inner, name)


@pytest.mark.parametrize("is_load", [True, False])
def test_after_an_error_of_a_call_no_copy_uses_its_memory(is_load: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        assert cache.save(keys(5, 4), [pool.blocks(0, 4)]).complete
        attachment = cache._attachment
        assert attachment is not None
        copier = Noting(attachment.copier)
        cache._attachment = attachment._replace(copier=copier)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="_advance"):
            failing = Failing(cache, "_advance")
            advance = cache._advance
            patch.setattr(cache, "_advance", lambda: failing._advance() if failing._times else advance())
            if is_load:
                cache.load(keys(5, 4), [pool.blocks(0, 4)])
            else:
                cache.save_each([(keys(seed, 4), [pool.blocks(0, 4)]) for seed in (6, 7)])
        assert copier.calls[-2:] == ["drain", "poll"]
        assert not cache.busy
        if not is_load:
            assert cache.exists(keys(6, 4)) == cache.exists(keys(7, 4)) == 0, "the memory may have changed meanwhile"
        assert cache.stats()["saves"] == cache.stats()["loads"] == 0


def test_an_error_while_a_cache_closes_ends_its_copies_and_keeps_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.open(HOST | on_disk(tmp_path), {"test": 1}, [Group((SIZE,))], TOKENS)
    pool = Pool(cache)
    job = cache.begin_save(keys(1, 4), [pool.blocks(0, 4)])
    attachment = cache._attachment
    assert attachment is not None
    copier = Noting(attachment.copier)
    cache._attachment = attachment._replace(copier=copier)
    monkeypatch.setattr(cache, "_advance", Failing(None, "_advance", times=2)._fail)
    with pytest.raises(RuntimeError, match="_advance"):
        cache.close()
    assert copier.calls == ["drain"]
    assert not job.ended
    with opened(on_disk(tmp_path)) as again:
        assert again.save(keys(1, 4), [Pool(again).blocks(0, 4)]).complete


def test_without_threads_the_memory_is_attached_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        cache._attachment, cache._attach_at = None, 0.0
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Failing(None, "start")._fail)
            assert cache.save(keys(1, 2), [pool.blocks(0, 2)]).done == {}
        while cache._attachment is None:
            cache._attach_at = 0.0
            cache.save(keys(1, 2), [pool.blocks(0, 2)])
        assert cache.save(keys(1, 2), [pool.blocks(0, 2)]).complete
        assert cache.stats()["saves"] == 0


def test_a_save_with_a_hole_ends_when_the_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        monkeypatch.setattr(cache, "_attached", lambda _: None)
        numbers = np.asarray([0, 1, 2, 5, 6])
        job = cache.save(keys(4, 7), [Blocks(0, numbers, pool.blocks(0, 5).addresses)])
        assert (job.ended, job.done) == (True, {})
        assert cache.stats()["saves"] == 0


def test_a_save_that_finds_no_memory_keeps_the_blocks_that_fit_and_ends_in_time() -> None:
    big = 1 << 20
    with Cache.open({"host_memory": "64MiB"}, {"test": 1}, [Group((big,))], TOKENS) as cache:
        rows = np.zeros((80, big), np.uint8)
        address = cache.add_region(rows)
        blocks = Blocks(0, np.arange(80), address + np.arange(80) * big)
        for _ in range(2):
            # The second one brings nothing that is not there.
            job = cache.save(keys(9, 80), [blocks], timeout_s=0.2)
            assert job.ended
            assert not job.complete
            kept = len(job.done[0])
            assert 0 < kept <= 64
            assert job.done[0] == frozenset(range(kept))
            assert cache.exists(keys(9, 80)) == kept * TOKENS


def test_memory_that_was_not_named_is_not_touched() -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        with pytest.raises(ValueError, match="add_region"):
            cache.save(keys(1, 1), [Blocks(0, np.asarray([0]), np.asarray([4096]))])
        with pytest.raises(ValueError, match="add_region"):
            cache.save(keys(1, 65), [pool.blocks(0, 65)])
        with pytest.raises(ValueError, match="ascend"):
            cache.save(keys(1, 2), [Blocks(0, np.asarray([1, 0]), pool.blocks(0, 2).addresses)])
        with pytest.raises(ValueError, match="there are 1"):
            cache.save(keys(1, 1), [pool.blocks(0, 1, group=1)])
        with pytest.raises(ValueError, match="twice"):
            cache.save(keys(1, 2), [pool.blocks(0, 1), pool.blocks(1, 2)])
        with pytest.raises(ValueError, match="read-only"):
            cache.add_region(bytes(10))


def test_regions_may_lie_in_each_other() -> None:
    with opened({}) as cache:
        pool = Pool(cache)
        inner = pool.rows[4:6]
        cache.add_region(inner)
        pool.rows[:] = content(3, 64)
        assert cache.save(keys(3, 10), [pool.blocks(0, 10)]).complete, "most of it lies behind the inner region's end"


def test_a_copy_that_is_asked_for_while_the_cache_closes_never_begins() -> None:
    """`close` waits for the copies under way. One that began afterwards would use memory that others have by then."""
    with opened({}) as cache:
        pool = Pool(cache)
        drain, begun = cache.drain, []

        def drained() -> None:
            drain()
            begun.append(cache.begin_save(keys(4, 4), [pool.blocks(0, 4)]))

        cache.drain = drained  # type: ignore[method-assign]
        cache.close()
    [job] = begun
    assert job.ended and not job.done and job.copied_bytes == 0


def test_options_of_the_connector_are_refused_by_name() -> None:
    groups = [Group((SIZE,))]
    with pytest.raises(ConfigError, match="cache_hit_threshold"):
        Cache.open({"cache_hit_threshold": 0.5}, {}, groups, TOKENS)
    with pytest.raises(ConfigError, match="did you mean 'disk_path'"):
        Cache.open({"disk_paht": "/x"}, {}, groups, TOKENS)
    with pytest.raises(ConfigError, match="attention"):
        Cache.open(HOST, {}, [Group((SIZE,), "attention")], TOKENS)


def test_threads_share_a_cache() -> None:
    with opened({}) as cache:
        pools = [Pool(cache, 32) for _ in range(4)]
        wrong: list[str] = []

        def work(number: int) -> None:
            pool = pools[number]
            for turn in range(20):
                seed = number * 100 + turn
                pool.rows[:8] = wanted = content(seed, 8)
                own = chain(f"{seed} {block}".encode() for block in range(8))
                saved: Job = cache.save(own, [pool.blocks(0, 8)])
                loaded = cache.load(own, [pool.blocks(0, 8, row=8)])
                if not (saved.complete and loaded.complete and (pool.rows[8:16] == wanted).all()):
                    wrong.append(f"thread {number}, turn {turn}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(pools))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert not cache.busy


def test_the_example_of_the_documents_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/embed.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(program.splitlines()) <= 40
    file = tmp_path / "example.py"
    file.write_text(program, encoding="utf-8")
    for found in ("0 of 512", "512 of 512"):
        ran = subprocess.run(
            [sys.executable, str(file), str(tmp_path / "cache")], timeout=60, capture_output=True, text=True, check=True
        )
        assert f"found {found} tokens" in ran.stdout, ran.stdout
        assert "loaded 32 blocks, equal: True" in ran.stdout
