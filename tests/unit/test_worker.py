"""The worker's half of the connector on real vLLM-shaped KV caches, with a scripted scheduler's half."""

from __future__ import annotations

import logging
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec

from kv_caches import BLOCKS, allocate, block_content, fill, full, group, plan
from undercroft._core import Arena, UndercroftError
from undercroft.connector.connector import UndercroftConnector
from undercroft.connector.metadata import GroupCopy, TransferJob, UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.connector.observe.stats import Counts
from undercroft.connector.worker.worker import WorkerConnector
from undercroft.device.factory import make_copier
from undercroft.device.layout import LayoutError, group_shard_bytes
from undercroft.log import logger

ARENA = 1 << 20


class Host:
    """Arenas by the path of their engine's socket, and the errors that attaching raises."""

    def __init__(self) -> None:
        self.arenas: dict[str, Arena] = {"/a": Arena.create(ARENA)}
        self.attempts: list[str] = []
        self.now = 100.0

    def attach(self, socket: str, session: int) -> Arena:
        self.attempts.append(socket)
        if socket not in self.arenas:
            raise UndercroftError(f"{socket}: nobody answers")
        return self.arenas[socket]


class Hooks(UndercroftConnector):
    """The connector's hooks of a worker's half that is made elsewhere. An error in a hook is raised."""

    def __init__(self, worker: WorkerConnector) -> None:
        self._worker, self._counts, self._engine_stats, self._shadow = worker, Counts(), None, None

    def _report(self, hook: str, error: Exception) -> None:
        raise error


class Rank:
    """One worker with its KV cache; `step` calls its hooks as vLLM's model runner does."""

    def __init__(
        self,
        host: Host,
        layout: str = "LBHNC",
        rank: int = 0,
        ranks: int = 1,
        replicas: int = 1,
        spec: KVCacheSpec | None = None,
        heads: int = 0,
    ) -> None:
        self.config = plan(layout, [group("full", 3, spec or full())])
        self.config.kv_tp_replicas = replicas
        parallel = SimpleNamespace(rank=rank, tensor_parallel_size=ranks)
        hf_config = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads})
        model = SimpleNamespace(get_total_num_kv_heads=lambda: heads, hf_text_config=hf_config)
        vllm_config: Any = SimpleNamespace(parallel_config=parallel, model_config=model)
        self.worker = WorkerConnector(vllm_config, self.config, attach=host.attach, clock=lambda: host.now)
        self.connector = Hooks(self.worker)
        self.caches = allocate(self.config)
        fill(self.caches, seed=rank)

    def step(self, metadata: UndercroftMetadata) -> tuple[set[str], set[str], UndercroftWorkerMetadata | None]:
        self.connector.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        if self.worker._copier is not None:
            self.worker._copier.drain()
        return self.results()

    def results(self) -> tuple[set[str], set[str], UndercroftWorkerMetadata | None]:
        """What the hooks at the end of a step return."""
        results = self.connector.get_transfer_results(set())
        assert not results.finished_sending
        assert results.failed_recving <= results.finished_recving
        return results.finished_recving, results.failed_recving, self.connector.build_connector_worker_meta()

    def block(self, block: int) -> list[bytes]:
        return block_content(self.config, self.caches, 0, block)


def job(number: int, blocks: list[int], slots: list[int], request: str = "r", session: int = 0) -> TransferJob:
    return TransferJob(number, request, session, [GroupCopy(0, np.array(blocks), np.array(slots))])


def meta(
    socket: str = "/a",
    generation: int = 0,
    loads: list[TransferJob] | None = None,
    saves: list[TransferJob] | None = None,
) -> UndercroftMetadata:
    return UndercroftMetadata(socket, generation, loads=loads or [], saves=saves or [])


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_save_then_load_restores_the_bytes(host: Host, layout: str) -> None:
    one = Rank(host, layout)
    one.worker.register_kv_caches(one.caches)
    expected = [one.block(2), one.block(7)]
    assert one.step(meta(saves=[job(11, [2, 7], [0, 65536])])) == (set(), set(), UndercroftWorkerMetadata({11: 1}))
    fill(one.caches, seed=9)
    assert one.step(meta(loads=[job(11, [5, 1], [0, 65536], "x")])) == ({"x"}, set(), None)
    assert [one.block(5), one.block(1)] == expected
    assert one.step(meta()) == (set(), set(), None)
    assert host.attempts == ["/a"]

    stats = one.worker.get_kv_connector_stats()
    assert stats is not None
    shard = 3 * 1024
    assert stats.pop("load_seconds") > 0
    assert stats.pop("save_seconds") > 0
    assert stats == {"load_bytes": 2 * shard, "save_bytes": 2 * shard, "loads_done": 1, "saves_done": 1}
    assert one.worker.get_kv_connector_stats() is None


def test_ranks_with_the_same_kv_have_one_shard_and_take_turns_to_save_it(host: Host) -> None:
    """Two ranks of four hold the same half of the heads: a payload has two shards."""
    ranks = [Rank(host, rank=rank, ranks=4, replicas=2) for rank in range(4)]
    shard, blocks = 3 * 1024, [1, 2, 3, 5]
    slots = [2 * shard * place for place in range(len(blocks))]
    expected, answer = [], UndercroftWorkerMetadata()
    for rank, one in enumerate(ranks):
        fill(one.caches, seed=rank // 2)
        one.worker.register_kv_caches(one.caches)
        expected.append([one.block(block) for block in blocks])
        saved = one.step(meta(saves=[job(1, blocks, slots), job(2, [4], [2 * shard * 7])]))[2]
        assert saved is not None
        answer = answer.aggregate(saved)
        stats = one.worker.get_kv_connector_stats()
        assert stats is not None
        # The even blocks are 2 and 4, the odd ones 1, 3 and 5.
        assert stats["save_bytes"] == shard * (2 if rank % 2 == 0 else 3)
    assert answer == UndercroftWorkerMetadata({1: 4, 2: 4}, set())
    for one, content in zip(ranks, expected, strict=True):
        fill(one.caches, seed=77)
        assert one.step(meta(loads=[job(3, blocks, slots)])) == ({"r"}, set(), None)
        assert [one.block(block) for block in blocks] == content


def test_one_rank_loads_blocks_that_ranks_with_replicated_heads_saved(host: Host) -> None:
    """Four ranks have two heads: each pair takes turns to save one, and a single rank has both."""
    ranks, blocks, slots = [Rank(host, "LBHNC", rank, 4, 1, full(heads=1), 2) for rank in range(4)], [1, 2], [0, 4096]
    for rank, one in enumerate(ranks):
        fill(one.caches, seed=rank // 2)
        one.worker.register_kv_caches(one.caches)
        one.step(meta(saves=[job(1, blocks, slots)]))
        stats = one.worker.get_kv_connector_stats()
        assert stats is not None
        assert stats["save_bytes"] == 3 * 512
    alone = Rank(host, spec=full(heads=2), heads=2)
    alone.worker.register_kv_caches(alone.caches)
    assert alone.step(meta(loads=[job(2, blocks, slots)]))[0] == {"r"}
    for block in blocks:
        halves = [one.block(block) for one in (ranks[0], ranks[2])]
        assert alone.block(block) == [first + second for first, second in zip(*halves, strict=True)]


def test_vllm_reports_that_ranks_hold_the_same_latents_and_they_are_kept_once(host: Host) -> None:
    sizes: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    latents = MLAAttentionSpec(**sizes, max_tp_shards=1)
    replicas = kv_cache_utils.kv_cache_groups_tp_replicas([group("full", 3, latents)], 2)
    assert replicas == 2
    assert kv_cache_utils.kv_cache_groups_tp_replicas([group("full", 3, FullAttentionSpec(**sizes))], 2) == 1, (
        "heads are not reported"
    )
    ranks = [Rank(host, "BLHNC", rank, 2, replicas, latents) for rank in range(2)]
    shard = group_shard_bytes(ranks[0].config, 0)
    assert shard == 3 * 16 * 576 * 2
    slots = [place * shard for place in range(4)]
    for one in ranks:
        fill(one.caches, seed=5)
        one.worker.register_kv_caches(one.caches)
        expected = [one.block(block) for block in (1, 2, 3, 4)]
        one.step(meta(saves=[job(1, [1, 2, 3, 4], slots)]))
    for one in ranks:
        fill(one.caches, seed=6)
        assert one.step(meta(loads=[job(2, [5, 6, 7, 8], slots)]))[:2] == ({"r"}, set())
        assert [one.block(block) for block in (5, 6, 7, 8)] == expected


def test_ranks_fill_one_payload_and_their_answers_add_up(host: Host) -> None:
    ranks = [Rank(host, rank=rank, ranks=2) for rank in range(2)]
    expected = []
    answers = []
    for one in ranks:
        one.worker.register_kv_caches(one.caches)
        expected.append(one.block(4))
        answers.append(one.step(meta(saves=[job(1, [4], [0])]))[2])
        fill(one.caches, seed=77)
    first, second = answers
    assert first is not None
    assert second is not None
    assert first.aggregate(second) == UndercroftWorkerMetadata({1: 2}, set())
    for one, content in zip(ranks, expected, strict=True):
        one.step(meta(loads=[job(2, [6], [0])]))
        assert one.block(6) == content


@pytest.mark.parametrize(
    ("blocks", "slots"), [([0], [0]), ([BLOCKS], [0]), ([1], [ARENA]), ([1], [-1]), ([1, 2], [0])], ids=str
)
def test_a_job_out_of_range_fails_alone(host: Host, blocks: list[int], slots: list[int]) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    bad, good = job(1, blocks, slots, "bad"), job(2, [1], [0], "good")
    received, failed, answer = one.step(meta(loads=[bad, good], saves=[bad, good]))
    assert (received, failed) == ({"bad", "good"}, {"bad"})
    assert answer == UndercroftWorkerMetadata({1: 1, 2: 1}, {1})


def test_loads_that_could_not_begin_are_reported_as_failed(host: Host) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    metadata = meta()
    metadata.failed_loads.append("gone")
    assert one.step(metadata) == ({"gone"}, {"gone"}, None)
    assert one.step(meta()) == (set(), set(), None)


def test_without_an_arena_every_job_ends_as_failed(
    host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            jobs = meta("/nobody", loads=[job(number, [1], [0])], saves=[job(number, [1], [0])])
            assert one.step(jobs) == ({"r"}, {"r"}, UndercroftWorkerMetadata({number: 1}, {number}))
    assert host.attempts == ["/nobody"], "each step would wait for an engine that does not answer"
    assert len(caplog.records) == 2

    host.now += 1.5
    host.arenas["/nobody"] = Arena.create(ARENA)
    assert one.step(meta("/nobody", saves=[job(9, [1], [0])]))[2] == UndercroftWorkerMetadata({9: 1})
    assert host.attempts == ["/nobody", "/nobody"]


def test_a_step_does_not_wait_for_an_engine_that_does_not_answer(host: Host) -> None:
    one, answers, attempts = Rank(host), threading.Event(), []

    def attach(socket: str, session: int) -> Arena:
        attempts.append(socket)
        answers.wait(30)
        return host.attach(socket, session)

    parallel = SimpleNamespace(rank=0, tensor_parallel_size=1)
    config: Any = SimpleNamespace(parallel_config=parallel)
    one.worker = WorkerConnector(config, one.config, attach=attach, attach_timeout_s=0.0)
    one.connector = Hooks(one.worker)
    one.worker.register_kv_caches(one.caches)
    for number in range(3):
        assert one.step(meta(loads=[job(number, [1], [0])]))[:2] == ({"r"}, {"r"}), "the job fails at once"
    assert attempts == ["/a"], "the attempt goes on"
    answers.set()
    while one.step(meta(saves=[job(9, [1], [0])]))[2] != UndercroftWorkerMetadata({9: 1}):
        pass
    assert attempts == ["/a"]


def test_attempts_become_rarer(host: Host) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    times = []
    for _ in range(400):
        before = len(host.attempts)
        one.step(meta("/nobody", saves=[job(1, [1], [0])]))
        if len(host.attempts) > before:
            times.append(host.now)
        host.now += 0.5
    gaps = np.diff(times)
    assert gaps[:4].tolist() == [1.0, 2.0, 4.0, 8.0]
    assert gaps.max() == 60.0


def test_a_device_that_cannot_be_copied_is_not_tried_in_every_step(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr("undercroft.connector.worker.worker.make_copier", refuse)
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    for _ in range(5):
        assert one.step(meta(loads=[job(1, [3], [0])]))[:2] == ({"r"}, {"r"})
    assert host.attempts == ["/a"]


def test_another_arena_is_attached_anew(host: Host) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    expected = one.block(3)
    one.step(meta(saves=[job(1, [3], [0])]))
    host.arenas["/b"] = Arena.create(ARENA)
    one.step(meta("/b", loads=[job(2, [3], [0])]))
    assert one.block(3) != expected, "the new arena holds other bytes"
    one.step(meta("/a", loads=[job(3, [3], [0])]))
    assert one.block(3) == expected
    assert host.attempts == ["/a", "/b", "/a"]


def test_an_arena_of_another_generation_is_refused(host: Host) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    assert one.step(meta(generation=5, loads=[job(1, [3], [0])]))[:2] == ({"r"}, {"r"})


def test_results_of_the_old_arena_are_reported_after_a_change(host: Host) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    one.worker.wait_for_save(meta(saves=[job(1, [3], [0])]))
    host.arenas["/b"] = Arena.create(ARENA)
    one.worker.wait_for_save(meta("/b", saves=[job(2, [3], [0])]))
    answer = UndercroftWorkerMetadata()
    while len(answer.saves_ended) < 2:
        answer = answer.aggregate(one.step(meta("/b"))[2] or UndercroftWorkerMetadata())
    assert answer.saves_ended == {1: 1, 2: 1}
    assert 1 in answer.saves_failed, "its arena serves no more"


def test_a_declined_layout_fails_every_job(host: Host) -> None:
    one = Rank(host)
    one.caches["full.1"] = torch.zeros_like(one.caches["full.1"])
    with pytest.raises(LayoutError):
        one.worker.register_kv_caches(one.caches)
    assert one.step(meta(loads=[job(1, [3], [0])]))[:2] == ({"r"}, {"r"})
    assert host.attempts == []


def test_sleep_ends_copies_and_wake_up_finds_the_pages_again(host: Host) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    expected = one.block(3)
    one.worker.wait_for_save(meta(saves=[job(1, [3], [0])]))
    one.worker.unregister_kv_caches()
    fill(one.caches, seed=5)
    one.worker.unregister_kv_caches()
    assert one.step(meta(loads=[job(2, [3], [0])])) == ({"r"}, {"r"}, UndercroftWorkerMetadata({1: 1}))
    one.worker.restore_kv_caches()
    one.worker.restore_kv_caches()
    assert one.step(meta(loads=[job(3, [3], [0])]))[:2] == ({"r"}, set())
    assert one.block(3) == expected


def test_a_checkpoint_finds_no_arena_and_the_next_job_attaches_it_again(host: Host) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    expected = one.block(3)
    one.worker.wait_for_save(meta(saves=[job(1, [3], [0])]))
    one.worker.release_arena()
    attempts = len(host.attempts)
    fill(one.caches, seed=5)
    assert one.step(meta(loads=[job(2, [3], [0])])) == ({"r"}, set(), UndercroftWorkerMetadata({1: 1}))
    assert one.block(3) == expected
    assert len(host.attempts) == attempts + 1


def test_shutdown_waits_for_copies_and_comes_twice(host: Host) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    one.worker.wait_for_save(meta(saves=[job(1, [3], [0])]))
    one.worker.shutdown()
    one.worker.shutdown()
    assert one.step(meta())[2] == UndercroftWorkerMetadata({1: 1})


def test_slots_of_a_lost_session_are_not_touched(host: Host) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    expected = one.block(3)
    assert one.step(meta(saves=[job(1, [3], [0])]))[2] == UndercroftWorkerMetadata({1: 1})
    fill(one.caches, seed=9)
    now = meta(loads=[job(2, [4], [0], "x", session=8)], saves=[job(3, [4], [0], session=8)])
    assert one.step(now) == ({"x"}, {"x"}, UndercroftWorkerMetadata({3: 1}, {3}))
    assert one.step(meta(loads=[job(4, [5], [0], "y")]))[:2] == ({"y"}, set())
    assert one.block(5) == expected


class Gone:
    """An arena whose engine ends when the test says so."""

    def __init__(self) -> None:
        self.arena = Arena.create(ARENA)
        self.is_served = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arena, name)


@pytest.mark.parametrize("why", ["its engine has gone", "there is another session"])
def test_an_arena_that_serves_no_more_is_let_go_of(host: Host, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, old = Rank(host), Gone()
    monkeypatch.setitem(host.arenas, "/a", old)
    monkeypatch.setattr(
        "undercroft.connector.worker.worker.make_copier",
        lambda layout, arena, *more: make_copier(layout, getattr(arena, "arena", arena), *more),
    )
    one.worker.register_kv_caches(one.caches)
    assert one.step(meta(saves=[job(1, [2], [0])]))[2] == UndercroftWorkerMetadata({1: 1})
    one.step(meta())
    assert one.worker._arena.attached is not None and one.worker._arena.attached.mapping is old
    if why == "its engine has gone":
        old.is_served = False
        # The watcher sees it, since steps without transfers do not look.
        one.worker.release_unserved()
    else:
        one.step(meta(socket="/b"))
    assert one.worker._arena.attached is None and one.worker._copier is None
    host.arenas["/b"] = Arena.create(ARENA)
    assert one.step(meta(socket="/b", saves=[job(2, [2], [0])]))[2] == UndercroftWorkerMetadata({2: 1})
    assert host.attempts == ["/a", "/b"]


def test_a_step_without_transfers_waits_for_no_lock(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    assert one.step(meta(saves=[job(1, [2], [0])]))[2] == UndercroftWorkerMetadata({1: 1})
    assert one.worker.get_kv_connector_stats() is not None
    assert one.step(meta()) == (set(), set(), None)
    monkeypatch.setattr(one.worker.rest, "lock", None)
    assert one.step(meta()) == (set(), set(), None)
    assert one.connector.get_kv_connector_stats() is None
    with pytest.raises(TypeError, match="context manager"):
        one.step(meta(saves=[job(2, [2], [0])]))


def test_loads_of_a_step_are_answered_although_the_old_arena_cannot_be_let_go_of(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    assert one.step(meta(saves=[job(1, [2], [0])]))[2] == UndercroftWorkerMetadata({1: 1})

    def broken() -> None:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(one.worker, "_set_aside", broken)
    assert one.step(meta(socket="/b", loads=[job(2, [2], [0], "x")]))[:2] == ({"x"}, {"x"})


@pytest.mark.parametrize("change", ["a load ends", "the device registers memory", "another arena is named", "a job"])
def test_whatever_changes_wakes_a_worker_that_rests(host: Host, change: str) -> None:
    """Also what a thread of its own changes between two steps."""
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    one.step(meta(saves=[job(1, [2], [0])]))
    one.connector.get_kv_connector_stats()
    one.step(meta())
    assert one.worker.rest.message == meta()
    if change == "a load ends":
        # As the watcher's thread finds it: the copy has ended, and no step has run since.
        one.connector.bind_connector_metadata(meta(loads=[job(2, [3], [0], "x")]))
        one.connector.start_load_kv(None)
        one.worker._copier.drain()
        assert one.worker.rest.message is None
        assert one.results() == ({"x"}, set(), None)
    elif change == "the device registers memory":
        one.worker._arena.attached.newly_registered = lambda: 4096
        one.worker.release_unserved()
        assert one.worker.rest.message is None
        stats = one.connector.get_kv_connector_stats()
        assert stats is not None and stats.data["counters"] == {"registered_bytes": 4096}
    elif change == "another arena is named":
        host.arenas["/b"] = Arena.create(ARENA)
        one.step(meta("/b"))
        assert one.worker._arena.attached is None
    else:
        assert one.step(meta(saves=[job(2, [3], [0])]))[2] == UndercroftWorkerMetadata({2: 1})
    one.connector.get_kv_connector_stats()
    one.step(meta())
    assert one.worker.rest.message == meta()
