"""The CUDA copier on a real device, slowed down by spinning kernels so that a missing dependency shows."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from copy_workload import Workload
from fake_cuda import Fake
from undercroft._core import Arena, BlockPieces
from undercroft.device.api import Job
from undercroft.device.cuda import STRATEGIES, CudaCopier
from undercroft.device.cuda_streams import CudaStreams, pin
from undercroft.device.factory import make_copier
from undercroft.device.lane import Lanes
from undercroft.device.layout import SUPPORTED_LAYOUTS, DeviceLayout, GroupCopy
from undercroft.device.memcpy import BatchedCopy, DriverBatch, DriverLoop, VllmCopy, driver_copy
from undercroft.device.pinning import ArenaPinner
from undercroft.device.synthetic import SyntheticCache, synthetic_cache

ARENA = 4 << 20
PAGE = 4992
LAYERS = 4
SLOT = 20480
SPIN = 100_000
"""Cycles of a spinning kernel: some tens of microseconds, longer than the copies here."""
LONG_SPIN = 50 * SPIN
"""Some milliseconds: longer than a lane's thread takes to queue a job, and this thread to look at a queued one."""
SEEDS = range(4)


class SlowStreams(CudaStreams):
    """Every copy starts late."""

    spin = SPIN

    def copy(self, stream: Any, pieces: BlockPieces, arena: int, *, to_arena: bool) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(self.spin)
        super().copy(stream, pieces, arena, to_arena=to_arena)


class Untimed(SlowStreams):
    """Broken streams may end a job before its first event.

    Torch refuses to time such a job, which would hide the bytes.
    """

    def seconds(self, begin: Any, end: Any) -> float:
        return 0.0


class WithoutWaits(Untimed):
    def wait(self, stream: Any, event: Any) -> None:
        pass


class EventsTooEarly(Untimed):
    spin = LONG_SPIN

    def happened(self, event: Any) -> bool:
        return True


class Fixed:
    """Claims that so much of the arena is pinned, and pins nothing."""

    def __init__(self, pinned_bytes: int) -> None:
        self.pinned_bytes = pinned_bytes

    def close(self) -> None:
        pass


def driver() -> BatchedCopy:
    return driver_copy(ctypes.CDLL("libcuda.so.1"))


@pytest.fixture
def pinned(device: torch.device) -> Iterator[Callable[[Arena], ArenaPinner]]:
    """Pins arenas for as long as the test runs."""
    pinners: list[tuple[ArenaPinner, Arena]] = []

    def pinned(arena: Arena) -> ArenaPinner:
        pinner = pin_whole(device, arena)
        pinners.append((pinner, arena))
        return pinner

    yield pinned
    torch.cuda.synchronize()
    for pinner, _ in pinners:
        pinner.close()


def pin_whole(device: torch.device, arena: Arena) -> ArenaPinner:
    pinner = pin(device, arena)
    assert pinner.wait(60)
    assert pinner.pinned_bytes == arena.size
    return pinner


def work(
    streams: CudaStreams,
    device: torch.device,
    seed: int,
    layout: str,
    pinner: Any,
    arena: Arena,
    model_spin: int = SPIN,
    **more: Any,
) -> None:
    cache: SyntheticCache = synthetic_cache(PAGE, 17, LAYERS, layout, device)
    lanes = Lanes.make(streams, 5 * PAGE * LAYERS)
    copier = CudaCopier(cache.layout, arena, lanes, pinner, **more)

    def enqueue(what: Callable[[], None]) -> None:
        torch.cuda._sleep(model_spin)
        what()

    ticks = itertools.count()

    def tick() -> None:
        # However fast the host is: jobs end while others still begin, and the steps do not run out of blocks.
        if next(ticks) % 8 == 0:
            copier.drain()

    workload = Workload(
        copier, cache, arena, enqueue, tick, seed, slot_bytes=SLOT, stage=lambda tensor: tensor.pin_memory()
    )
    try:
        workload.run(400)
        torch.cuda.synchronize()
        workload.check()
    finally:
        copier.close()
        torch.cuda.synchronize()
    assert min(workload.ended[what] for what in ("saved", "loaded", "cancelled")) > 0
    assert workload.ended["failed"] == 0


@pytest.mark.parametrize(("layout", "strategy"), list(itertools.product(SUPPORTED_LAYOUTS, STRATEGIES)))
def test_bytes_are_right_on_slow_streams(
    device: torch.device, layout: str, strategy: str, pinned: Callable[[Arena], ArenaPinner]
) -> None:
    for seed in SEEDS:
        arena = Arena.create(ARENA)
        work(SlowStreams(device), device, seed, layout, pinned(arena), arena, strategy=strategy)


@pytest.mark.parametrize("strategy", ["direct", "gather"])
def test_bytes_are_right_in_memory_that_is_not_pinned(device: torch.device, strategy: str) -> None:
    for seed in SEEDS:
        # Half of it looks pinned, so that jobs take both ways; none of it is.
        work(SlowStreams(device), device, seed, "LBHNC", Fixed(ARENA // 2), Arena.create(ARENA), strategy=strategy)


@pytest.mark.parametrize("broken", [WithoutWaits, EventsTooEarly])
@pytest.mark.parametrize("strategy", ["direct", "gather"])
def test_a_missing_dependency_is_found(
    device: torch.device, broken: type[SlowStreams], strategy: str, pinned: Callable[[Arena], ArenaPinner]
) -> None:
    with pytest.raises(AssertionError, match="wrong bytes"):
        for seed in SEEDS:
            arena = Arena.create(ARENA)
            work(broken(device), device, seed, "LBHNC", pinned(arena), arena, LONG_SPIN, strategy=strategy)


def test_the_driver_copies_in_batches() -> None:
    torch.cuda.init()
    assert isinstance(driver(), DriverBatch | DriverLoop)


@pytest.mark.parametrize("name", ["batch", "loop", "vllm"])
def test_every_way_to_copy_a_batch(device: torch.device, name: str, pinned: Callable[[Arena], ArenaPinner]) -> None:
    torch.cuda.init()
    if name == "vllm":
        pytest.importorskip("vllm._custom_ops", reason="needs vLLM")
        operator = getattr(torch.ops._C_cache_ops, "swap_blocks_batch", None)
        if operator is None:
            pytest.skip("this vLLM has no swap_blocks_batch")
        copy: BatchedCopy = VllmCopy(operator)
    else:
        copy = driver()
        if name == "batch" and not isinstance(copy, DriverBatch):
            pytest.skip("this driver is older than 12.8")
        if name == "loop":
            single = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
            single.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
            single.restype = ctypes.c_uint
            copy = DriverLoop(single)
    arena = Arena.create(ARENA)
    work(CudaStreams(device, copy), device, 1, "LBNHC", pinned(arena), arena)


def test_inside_and_outside_of_inference_mode(device: torch.device, pinned: Callable[[Arena], ArenaPinner]) -> None:
    arena = Arena.create(ARENA)
    cache = synthetic_cache(PAGE, 9, LAYERS, "LBHNC", device)
    copier = CudaCopier(cache.layout, arena, Lanes.make(CudaStreams(device)), pinned(arena), strategy="gather")
    for pages in cache.pages:
        pages[3].copy_(torch.randint(-128, 128, (PAGE,), dtype=torch.int8))
    expected = [pages[3].cpu() for pages in cache.pages]
    job = [GroupCopy(0, np.array([3]), np.array([0]))]
    with torch.inference_mode():
        copier.submit(True, [Job(1, job)])
    copier.submit(True, [Job(2, job)])
    copier.drain()
    for pages in cache.pages:
        pages[3].copy_(torch.zeros(PAGE, dtype=torch.int8))
    with torch.inference_mode():
        copier.submit(False, [Job(3, job)])
    copier.submit(False, [Job(4, job)])
    copier.drain()
    assert all(ended.ok for ended in copier.poll())
    assert all(torch.equal(pages[3].cpu(), was) for pages, was in zip(cache.pages, expected, strict=True))
    copier.close()


def test_copies_beside_the_replay_of_a_graph(device: torch.device, pinned: Callable[[Arena], ArenaPinner]) -> None:
    arena = Arena.create(ARENA)
    cache = synthetic_cache(PAGE, 9, LAYERS, "BLHNC", device)
    copier = CudaCopier(cache.layout, arena, Lanes.make(CudaStreams(device)), pinned(arena))
    content = torch.zeros(PAGE, dtype=torch.int8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pages in cache.pages:
            pages[1].copy_(content)
    for step in range(1, 50):
        torch.cuda._sleep(SPIN)
        content.copy_(torch.full((PAGE,), step, dtype=torch.int8).pin_memory(), non_blocking=True)
        graph.replay()
        copier.submit(True, [Job(step, [GroupCopy(0, np.array([1]), np.array([0]))])])
        copier.drain()
        assert [ended.ticket for ended in copier.poll()] == [step]
        assert ctypes.string_at(arena.address, PAGE * LAYERS) == bytes([step]) * PAGE * LAYERS
    copier.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_submitting_does_not_wait_for_the_device(
    device: torch.device, pinned: Callable[[Arena], ArenaPinner], is_pinned: bool
) -> None:
    arena = Arena.create(ARENA)
    cache = synthetic_cache(PAGE, 17, LAYERS, "LBHNC", device)
    # The driver blocks the thread that queues a copy of memory that is not pinned.
    pinner: Any = pinned(arena) if is_pinned else Fixed(0)
    copier = CudaCopier(cache.layout, arena, Lanes.make(CudaStreams(device)), pinner)
    job = [GroupCopy(0, np.arange(1, 17), np.arange(16) * SLOT)]
    for ticket in (1, 2):  # brings buffers into being
        copier.submit(ticket == 1, [Job(ticket, job)])
    copier.drain()
    copier.poll()
    torch.cuda._sleep(4_000_000_000)
    spinning = torch.cuda.Event()
    spinning.record()
    copier.submit(True, [Job(3, job)])
    copier.submit(False, [Job(4, job)])
    assert copier.poll() == []
    assert not spinning.query(), "submit or poll waited for the model's stream"
    copier.close()
    assert {ended.ticket for ended in copier.poll()} == {3, 4}


def test_a_device_without_free_memory_is_asked_for_buffers_once(
    fake: Fake, device: torch.device, pinned: Callable[[Arena], ArenaPinner]
) -> None:
    """At each refusal PyTorch frees the memory that it caches for the model, and waits for the device."""
    arena = Arena.create(ARENA)
    cache = synthetic_cache(PAGE, 17, LAYERS, "LBHNC", device)
    copier = CudaCopier(cache.layout, arena, Lanes.make(CudaStreams(device)), pinned(arena), strategy="gather")
    cache.pages[0].copy_(torch.randint(-128, 128, (17, PAGE), dtype=torch.int8))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    fake.limits_device_memory(0)
    asked = []
    try:
        for ticket in (1, 2, 3):
            before = fake.counts()["device_allocations"]
            copier.submit(True, [Job(ticket, [GroupCopy(0, np.arange(1, 17), np.arange(16) * SLOT)])])
            copier.drain()
            asked.append(fake.counts()["device_allocations"] - before)
    finally:
        fake.limits_device_memory(-1)
    assert asked[0] > 0 and asked[1:] == [0, 0]
    assert [ended.ok for ended in copier.poll()] == [True] * 3
    for block in range(1, 17):
        assert (
            ctypes.string_at(arena.address + (block - 1) * SLOT, PAGE) == cache.pages[0][block].cpu().numpy().tobytes()
        )
    copier.close()


def test_copies_have_the_priority_of_the_model_and_their_kernels_a_higher_one(device: torch.device) -> None:
    least, _ = torch.cuda.Stream.priority_range()
    lanes = Lanes.make(CudaStreams(device))
    assert {lane.handle.priority for lane in lanes} == {least}
    assert {lane.kernels.priority for lane in lanes} == {least - 1}, "the bus stands still until a kernel has run"
    assert torch.cuda.current_stream(device).priority == least, "no priority is lower than the model's"


def test_the_device_chooses_the_copier(device: torch.device) -> None:
    arena = Arena.create(ARENA)
    copier = make_copier(DeviceLayout(device, {}), arena)
    assert isinstance(copier, CudaCopier)
    copier.close()


def test_pinning_registers_and_lets_go(device: torch.device) -> None:
    arena = Arena.create(ARENA)
    for _ in range(2):  # a second registration of a registered range would be refused
        pin_whole(device, arena).close()
