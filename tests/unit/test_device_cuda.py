"""The CUDA copier on a device whose order the test decides: bytes right in every order that its events allow."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from copy_workload import Workload
from manual_streams import AtOnceExecutor, Event, LaterExecutor, ManualStreams, Queue, RefusingExecutor
from undercroft._core import Arena, StagedCopies
from undercroft.device.api import Ended, Job
from undercroft.device.cuda import STRATEGIES, CudaCopier, runs
from undercroft.device.lane import Lanes
from undercroft.device.layout import SUPPORTED_LAYOUTS, DeviceLayout, GroupCopy, GroupLayout, Part
from undercroft.device.synthetic import SyntheticCache, synthetic_cache
from undercroft.log import logger

ARENA = 64 << 10
LAYERS = 3
SEEDS = range(12)


class Pinned:
    """Stands in for the arena's pinner."""

    def __init__(self, pinned_bytes: int = 0) -> None:
        self.pinned_bytes = pinned_bytes


def make(
    streams: ManualStreams,
    layout: str = "LBHNC",
    page: int = 1008,
    pinner: Pinned | None = None,
    thread: Callable[[str], Any] = lambda name: AtOnceExecutor(),
    shards: int = 5,
    **settings: Any,
) -> tuple[CudaCopier, SyntheticCache, Arena]:
    cache = synthetic_cache(page, 7, LAYERS, layout)
    arena = Arena.create(ARENA)
    lanes = Lanes.make(streams, shards * page * LAYERS, thread)
    return CudaCopier(cache.layout, arena, lanes, pinner, **settings), cache, arena


def work(
    streams: ManualStreams, seed: int, steps: int = 250, pinner: Pinned | None = None, **settings: Any
) -> Workload:
    threads: list[LaterExecutor] = []

    def thread(name: str) -> LaterExecutor:
        threads.append(LaterExecutor())
        return threads[-1]

    copier, cache, arena = make(streams, pinner=pinner, thread=thread, **settings)

    def enqueue(what: Callable[[], None]) -> None:
        streams.run(streams.model, what)

    def tick() -> None:
        if pinner is not None:
            pinner.pinned_bytes = min(ARENA, pinner.pinned_bytes + 512)
        streams.random.choice(threads).run_one()
        for _ in range(streams.random.randint(0, 30)):
            streams.step()

    workload = Workload(copier, cache, arena, enqueue, tick, seed, slot_bytes=4096)
    workload.run(steps)
    streams.settle()
    workload.check()
    copier.close()
    return workload


@pytest.mark.parametrize(("layout", "strategy"), list(itertools.product(SUPPORTED_LAYOUTS, STRATEGIES)))
def test_bytes_are_right_in_any_order(layout: str, strategy: str) -> None:
    ended: Counter[str] = Counter()
    for seed in SEEDS:
        # A chunk of pinned memory ends in the middle of every second slot.
        ended += Counter(work(ManualStreams(seed), seed, layout=layout, strategy=strategy, pin_chunk=6000).ended)
    assert min(ended[what] for what in ("saved", "loaded", "cancelled")) > 0


@pytest.mark.parametrize("page", [64, 1002, 1001])
def test_pages_that_are_no_multiple_of_sixteen_bytes(page: int) -> None:
    for strategy in STRATEGIES:
        assert work(ManualStreams(1), 1, page=page, strategy=strategy).ended["failed"] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_are_right_while_memory_is_being_pinned(strategy: str) -> None:
    for seed in SEEDS:
        pinner = Pinned()
        work(ManualStreams(seed), seed, pinner=pinner, strategy=strategy)
        assert pinner.pinned_bytes > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_that_fails_halfway_ends_only_when_its_copies_have(strategy: str) -> None:
    for seed in SEEDS:
        streams = ManualStreams(seed)
        streams.fault_rate = 0.3
        assert work(streams, seed, strategy=strategy).ended["failed"] > 0


class NoMemory(ManualStreams):
    asked = 0

    def buffer(self, stream: Queue, size: int) -> torch.Tensor:
        self.asked += 1
        raise torch.OutOfMemoryError


def test_without_memory_for_staging_pages_are_copied_one_by_one() -> None:
    streams = NoMemory(0)
    assert work(streams, 0, strategy="gather").ended["failed"] == 0
    assert streams.asked == 2, "once for each direction"


class NoKernel(ManualStreams):
    asked = 0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.driver.kernel_error = 218

    def staged(self, stream: Queue, kernels: Queue) -> StagedCopies | None:
        self.asked += 1
        return super().staged(stream, kernels)


class NoStaged(NoKernel):
    def staged(self, stream: Queue, kernels: Queue) -> StagedCopies | None:
        self.asked += 1
        return None


@pytest.mark.parametrize("streams", [NoKernel, NoStaged])
def test_without_the_kernel_pages_are_copied_one_by_one(streams: type[NoKernel]) -> None:
    one = streams(0)
    ended = work(one, 0, strategy="gather").ended
    assert ended["failed"] == 0
    assert min(ended["saved"], ended["loaded"]) > 0
    assert one.asked == 2, "once for each direction"


class WithoutWaits(ManualStreams):
    def wait(self, stream: Queue, event: Event) -> None:
        pass


class WithoutWaitsOf(ManualStreams):
    """Waits are missing on one of the streams only. Each lane has a stream of copies and one of kernels: 1 and 2 are
    those of the saves, 3 and 4 of the loads, 5 and 6 of unpinned copies."""

    missing = 1
    model_is_slow = True

    def wait(self, stream: Queue, event: Event) -> None:
        if stream is not self.queues[self.missing]:
            super().wait(stream, event)


class SavesKernelsDoNotWait(WithoutWaitsOf):
    missing = 2


class LoadsDoNotWait(WithoutWaitsOf):
    missing = 3


class LoadsKernelsDoNotWait(WithoutWaitsOf):
    missing = 4


class UnpinnedDoNotWait(WithoutWaitsOf):
    missing = 5


class EventsTooEarly(ManualStreams):
    def happened(self, event: Event) -> bool:
        return True

    def seconds(self, begin: Event, end: Event) -> float:
        return 0.0


class EventBeforeTheLastCopy(ManualStreams):
    def record(self, stream: Queue) -> Event:
        event = super().record(stream)
        if stream is not self.model and len(stream.work) > 1:
            stream.work[-1], stream.work[-2] = stream.work[-2], stream.work[-1]
        return event


@pytest.mark.parametrize(
    "broken", [WithoutWaits, WithoutWaitsOf, LoadsDoNotWait, UnpinnedDoNotWait, EventsTooEarly, EventBeforeTheLastCopy]
)
@pytest.mark.parametrize("strategy", ["direct", "gather"])
def test_a_missing_dependency_is_found(broken: type[ManualStreams], strategy: str) -> None:
    pinner = Pinned(-(1 << 30)) if broken is UnpinnedDoNotWait else None
    with pytest.raises(AssertionError, match="wrong bytes"):
        for seed in SEEDS:
            work(broken(seed), seed, pinner=pinner, strategy=strategy)


@pytest.mark.parametrize("broken", [SavesKernelsDoNotWait, LoadsKernelsDoNotWait])
def test_a_kernel_that_does_not_wait_is_found(broken: type[ManualStreams]) -> None:
    with pytest.raises(AssertionError, match="wrong bytes"):
        for seed in SEEDS:
            work(broken(seed), seed, strategy="gather")


class HalvesAreNotWaitedFor(ManualStreams):
    """Waits for the events that say that a half of the staging buffer is free are missing."""

    def wait(self, stream: Queue, event: Event) -> None:
        free = self.driver.events[2:4]
        if event not in free:
            super().wait(stream, event)


@pytest.mark.parametrize("shards", [1, 5], ids=["one shard fills the buffer", "halves"])
def test_a_half_that_is_written_too_early_is_found(shards: int) -> None:
    for seed in SEEDS:
        work(ManualStreams(seed), seed, strategy="gather", shards=shards)
    with pytest.raises(AssertionError, match="wrong bytes"):
        for seed in SEEDS:
            work(HalvesAreNotWaitedFor(seed), seed, strategy="gather", shards=shards)


def copy_of(blocks: list[int], slots: list[int], group: int = 0) -> GroupCopy:
    return GroupCopy(group, np.array(blocks), np.array(slots))


def test_nothing_waits_and_nothing_ends_before_the_device_says_so() -> None:
    streams = ManualStreams(0)
    copier, *_ = make(streams)
    assert copier.submit(True, [Job(1, [copy_of([1], [0])])]) == [3024]
    assert copier.submit(True, [Job(2, [copy_of([2], [4096])])]) == [3024]
    assert copier.submit(True, [Job(3, [])]) == [0]
    assert copier.poll() == []
    polled = []
    while streams.step():
        polled += copier.poll()
    assert [(ended.ticket, ended.ok) for ended in polled] == [(1, True), (2, True), (3, True)]
    assert polled[0].seconds > 0
    copier.close()
    copier.close()
    with pytest.raises(RuntimeError, match="closed"):
        copier.submit(True, [Job(4, [])])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (copy_of([2], [ARENA - 3023]), "a shard of 3024 bytes at 62513 lies outside the arena of 65536 bytes"),
        (copy_of([2], [-1]), "at -1 lies outside"),
        (copy_of([0], [0]), "device block 0"),
        (copy_of([7], [0]), "device block 7"),
        (copy_of([1, 2], [0]), "both must be as long"),
        (copy_of([1], [0], group=3), "group 3"),
    ],
)
def test_a_refused_copy_queues_nothing(bad: GroupCopy, message: str) -> None:
    streams = ManualStreams(0)
    copier, *_ = make(streams)
    with pytest.raises(ValueError, match=message):
        copier.submit(False, [Job(1, [copy_of([1], [0]), bad])])
    assert not streams.step()
    copier.drain()
    assert copier.poll() == []


def test_jobs_on_memory_that_is_not_pinned_yet_go_a_way_of_their_own() -> None:
    streams = ManualStreams(0)
    pinner = Pinned(4096 + 3024)
    threads: dict[str, LaterExecutor] = defaultdict(LaterExecutor)
    copier, *_ = make(streams, pinner=pinner, thread=lambda name: threads[name])

    def pending() -> dict[str, int]:
        return {name.removeprefix("undercroft-"): len(thread.pending) for name, thread in threads.items()}

    copier.submit(False, [Job(1, [copy_of([1, 2], [0, 4096])])])
    assert pending() == {"save": 0, "load": 1, "unpinned": 0}
    copier.submit(False, [Job(2, [copy_of([3], [4097])]), Job(3, [copy_of([4], [0])])])
    copier.submit(True, [Job(4, [copy_of([4], [8192])])])
    assert pending() == {"save": 0, "load": 2, "unpinned": 2}
    threads["undercroft-load"].result()
    streams.settle()
    assert [ended.ticket for ended in copier.poll()] == [1, 3], "one that is pinned does not wait for one that is not"
    threads["undercroft-unpinned"].run_one()
    streams.settle()
    assert [ended.ticket for ended in copier.poll()] == [2]
    pinner.pinned_bytes = ARENA
    copier.submit(True, [Job(5, [copy_of([5], [12288])])])
    copier.close()
    assert [ended.ticket for ended in copier.poll()] == [5, 4]


def test_an_error_of_one_part_of_a_step_queues_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller submits the jobs of such a step again, one by one."""
    copier, *_ = make(ManualStreams(0), pinner=Pinned(4096))
    jobs = [Job(1, [copy_of([1], [0])]), Job(2, [copy_of([2], [8192])])]
    merged, calls = copier._merged, Counter[tuple[int, ...]]()

    def refuse(some: list[Job]) -> Any:
        tickets = tuple(job.ticket for job in some)
        calls[tickets] += 1
        if calls[2,] == 2:
            raise MemoryError
        return merged(some)

    monkeypatch.setattr(copier, "_merged", refuse)
    with pytest.raises(MemoryError):
        copier.submit(True, jobs)
    copier.drain()
    assert copier.poll() == []


class Failing(ManualStreams):
    """A device that fails at some point, and ever after."""

    failed = False

    def happened(self, event: Event) -> bool:
        return self._alive(super().happened(event))

    def record(self, stream: Queue) -> Event:
        return self._alive(super().record(stream))

    def finish(self, stream: Queue) -> None:
        self._alive(None)
        super().finish(stream)

    def _alive(self, value: Any) -> Any:
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return value


def test_jobs_on_a_failed_device_end_as_failed() -> None:
    streams = Failing(0)
    copier, *_ = make(streams)
    copier.submit(True, [Job(1, [copy_of([1], [0])])])
    streams.failed = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        copier.submit(True, [Job(2, [copy_of([2], [4096])])])
    copier.drain()
    assert copier.poll() == [Ended(1, False, 0.0)]
    copier.close()


@pytest.mark.parametrize("to_arena", [True, False], ids=["save", "load"])
def test_a_job_that_the_thread_refuses_never_runs(to_arena: bool) -> None:
    streams = ManualStreams(0)
    threads: dict[str, RefusingExecutor] = defaultdict(RefusingExecutor)
    copier, cache, arena = make(streams, thread=lambda name: threads[name])
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * ARENA).from_address(arena.address))
    for page in cache.pages:
        page[:] = torch.arange(7)[:, None]
    whole[:] = 77
    one = threads["undercroft-save" if to_arena else "undercroft-load"]
    one.refuses = True
    assert copier.submit(to_arena, [Job(1, [copy_of([1], [0])]), Job(2, [copy_of([2], [4096])])]) == [3024, 3024]
    one.refuses = False
    assert copier.submit(to_arena, [Job(3, [copy_of([3], [8192])])]) == [3024]
    copier.drain()
    assert [(ended.ticket, ended.ok) for ended in copier.poll()] == [(1, False), (2, False), (3, True)]
    if to_arena:
        assert (whole[:8192] == 77).all(), "the job that was reported as failed has written into slots"
        assert whole[8192] == 3
    else:
        assert cache.pages[0][:4, 0].tolist() == [0, 1, 2, 77], "it has written into blocks"


class MissingEvent(ManualStreams):
    """One of a job's events cannot be recorded: 1 is that of the step, the last one that of the job's end."""

    count = 0
    missing = 2

    def record(self, stream: Queue) -> Event:
        self.count += 1
        if self.count == self.missing:
            raise RuntimeError("out of memory")
        return super().record(stream)


@pytest.mark.parametrize(
    ("strategy", "to_arena", "missing"),
    [
        ("direct", True, 2),
        ("direct", False, 2),
        # Between kernel and copies, after the copies, at the end.
        *(("gather", True, event) for event in (2, 3, 4)),
        # Between copies and kernel, after the kernel, at the end.
        *(("gather", False, event) for event in (2, 3, 4)),
    ],
)
def test_a_job_with_an_event_that_cannot_be_recorded_is_waited_for(strategy: str, to_arena: bool, missing: int) -> None:
    for seed in SEEDS:
        streams = MissingEvent(seed)
        streams.missing = missing
        copier, *_ = make(streams, strategy=strategy)
        copier.submit(to_arena, [Job(1, [copy_of([1], [0])])])
        ended = copier.poll()
        while not ended:
            assert streams.step(), "the job never ends"
            ended = copier.poll()
        assert not streams.step(), "its copies may still be under way"
        assert [(one.ticket, one.ok) for one in ended] == [(1, False)]


def test_each_kind_of_error_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(logger, "log", lambda level, message, *args, **more: logged.append(message % args))
    streams = ManualStreams(0)
    copier, *_ = make(streams, strategy="direct")
    for ticket, error in enumerate(["copies: error 1 at 3", "copies: error 1 at 40", "copies: no memory"]):

        def refuse(*_: Any, error: str = error, **direction: bool) -> None:
            raise RuntimeError(error)

        monkeypatch.setattr(streams, "copy", refuse)
        copier.submit(True, [Job(ticket, [copy_of([1], [0])])])
        copier.drain()
    assert [message.rpartition("failed: ")[2] for message in logged] == ["copies: error 1 at 3", "copies: no memory"]
    assert [ended.ok for ended in copier.poll()] == [False] * 3


def test_many_pages_make_few_copies() -> None:
    class Counting(ManualStreams):
        def __init__(self) -> None:
            super().__init__(0)
            self.batches: list[list[int]] = []

        def copies(self, stream: Queue, copies: list[tuple[int, int, int]]) -> None:
            self.batches.append([size for _, _, size in copies])
            super().copies(stream, copies)

    for layout, slots, expected in [
        ("LBHNC", [0, 8192], [[3072, 3072]]),
        ("LBHNC", [0, 3072], [[6144]]),  # slots side by side
        ("BLHNC", [0, 8192], [[3072, 3072]]),
    ]:
        streams = Counting()
        copier, *_ = make(streams, layout, page=1024)
        copier.submit(False, [Job(1, [copy_of([1, 3], slots)])])
        assert streams.batches == expected


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([3], [(0, 3)]),
        ([3, 5, 8], [(0, 8)]),
        ([4, 8, 12, 13], [(0, 8), (8, 13)]),
        ([1000], [(0, 1000)]),
        ([3, 5, 100, 101], [(0, 5), (5, 100), (100, 101)]),
        ([100, 100, 102], [(0, 100), (100, 102)]),
    ],
    ids=str,
)
def test_small_jobs_share_a_run_and_none_waits_for_a_large_one_behind_it(
    ends: list[int], expected: list[tuple[int, int]]
) -> None:
    assert list(runs(ends, 7)) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_whose_pages_lie_at_other_distances_from_block_to_block(strategy: str) -> None:
    """As where the pages of one layer of a group lie between those of another group."""
    blocks, page = 5, 512
    memory = torch.randint(-128, 128, (blocks * 3 * page,), dtype=torch.int8)
    near, far = memory[: blocks * page].view(blocks, page), memory[blocks * page :].view(blocks, 2 * page)[:, :page]
    expected = [torch.cat([near[block], far[block]]).numpy().tobytes() for block in range(blocks)]
    addresses, strides = np.array([near.data_ptr(), far.data_ptr()]), np.array([page, 2 * page])
    sizes, places = np.full(2, page), np.array([0, page])
    group = GroupLayout(0, blocks, addresses, strides, sizes, places, 2 * page)
    layout, arena, streams = DeviceLayout(memory.device, {0: group}, (memory,)), Arena.create(ARENA), ManualStreams(0)
    lanes = Lanes.make(streams, 8 * page, lambda name: AtOnceExecutor())
    copier = CudaCopier(layout, arena, lanes, None, strategy=strategy)
    ids, slots = np.array([1, 4, 2]), np.array([0, 4096, 8192])
    copier.submit(True, [Job(1, [GroupCopy(0, ids, slots)])])
    streams.settle()
    assert [ctypes.string_at(arena.address + int(slot), 2 * page) for slot in slots] == [expected[i] for i in ids]
    memory.zero_()
    copier.submit(False, [Job(2, [GroupCopy(0, ids, slots)])])
    streams.settle()
    found = [torch.cat([near[block], far[block]]).numpy().tobytes() for block in range(blocks)]
    assert found == [expected[block] if block in ids else bytes(2 * page) for block in range(blocks)]
    assert [ended.ok for ended in copier.poll()] == [True, True]


def test_a_larger_staging_buffer_is_used_when_all_work_of_the_first_has_run() -> None:
    class Watched(ManualStreams):
        def __init__(self) -> None:
            super().__init__(0)
            self.left: list[int] = []

        def buffer(self, stream: Queue, size: int) -> torch.Tensor:
            self.left.append(sum(len(queue.work) for queue in self.queues[1:]))
            return super().buffer(stream, size)

    streams = Watched()
    lanes = Lanes.make(streams, 4096, lambda name: AtOnceExecutor())
    arena, caches = Arena.create(ARENA), [synthetic_cache(1008, 7, layers, "LBHNC") for layers in (2, 8)]
    for cache, size in zip(caches, (4096, 8 * 1008), strict=True):
        copier = CudaCopier(cache.layout, arena, lanes, None, strategy="gather")
        copier.submit(True, [Job(1, [copy_of([1, 2], [0, 8192])])])
        assert lanes.save._staging is not None
        assert lanes.save._staging.numel() == size
    assert streams.left[1] == 0, "kernels and copies of the first buffer"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_has_the_shard_behind_those_of_the_ranks_before_it(strategy: str) -> None:
    arena, streams = Arena.create(ARENA), ManualStreams(0)
    shard = 1008 * LAYERS
    for rank in range(3):
        cache = synthetic_cache(1008, 7, LAYERS, "LBHNC", part=Part(rank, 3, by_heads=False))
        for page in cache.pages:
            page[2] = rank + 1
        lanes = Lanes.make(streams, 5 * shard, lambda name: AtOnceExecutor())
        copier = CudaCopier(cache.layout, arena, lanes, None, strategy=strategy)
        copier.submit(True, [Job(rank, [copy_of([2], [0])])])
        streams.settle()
    assert ctypes.string_at(arena.address, 3 * shard) == b"".join(bytes([rank + 1]) * shard for rank in range(3))


@pytest.mark.parametrize("to_arena", [True, False], ids=["save", "load"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_ends_after_the_blocks_of_its_last_group(strategy: str, to_arena: bool) -> None:
    caches = [synthetic_cache(1008, 7, LAYERS, "LBHNC") for _ in range(2)]
    groups = {at: dataclasses.replace(cache.layout.groups[0], group=at) for at, cache in enumerate(caches)}
    tensors = tuple(tensor for cache in caches for tensor in cache.layout.tensors)
    layout, arena, streams = DeviceLayout(torch.device("cpu"), groups, tensors), Arena.create(ARENA), ManualStreams(0)
    lanes = Lanes.make(streams, 5 * 1008 * LAYERS, lambda name: AtOnceExecutor())
    copier = CudaCopier(layout, arena, lanes, None, strategy=strategy)
    both = [copy_of([1, 2], [0, 4096]), copy_of([1, 2, 3], [8192, 12288, 16384], group=1)]
    copier.submit(to_arena, [Job(1, both), Job(2, [copy_of([3], [20480])])])
    ended = []
    while len(ended) < 2:
        assert streams.step()
        ended += copier.poll()
    assert [(one.ticket, one.ok) for one in ended] == [(1, True), (2, True)]
    assert not streams.step(), "copies of a group follow the end of its job"


@pytest.mark.parametrize("gathered_last", [True, False])
def test_a_load_ends_after_its_kernels_and_after_its_direct_copies(gathered_last: bool) -> None:
    pages = (4096, 1008) if gathered_last else (1008, 4096)
    caches = [synthetic_cache(page, 7, LAYERS, "LBHNC") for page in pages]
    groups = {at: dataclasses.replace(cache.layout.groups[0], group=at) for at, cache in enumerate(caches)}
    tensors = tuple(tensor for cache in caches for tensor in cache.layout.tensors)
    layout, arena = DeviceLayout(torch.device("cpu"), groups, tensors), Arena.create(ARENA)
    for seed in SEEDS:
        streams = ManualStreams(seed)
        lanes = Lanes.make(streams, 5 * 1008 * LAYERS, lambda name: AtOnceExecutor())
        copier = CudaCopier(layout, arena, lanes, None, gather_below=2048)
        copier.submit(False, [Job(1, [copy_of([1, 2], [0, 16384]), copy_of([1, 2], [32768, 49152], group=1)])])
        while not (ended := copier.poll()):
            assert streams.step()
        assert [(one.ticket, one.ok) for one in ended] == [(1, True)]
        assert not streams.step(), "work of the job follows its end"


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast': not one of auto, direct, gather"):
        make(ManualStreams(0), strategy="fast")
