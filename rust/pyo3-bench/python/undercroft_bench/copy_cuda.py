"""How fast blocks go between a CUDA device and the arena, and how much that slows the model's own work.

Everything is compared with a copy of 256 MiB by one ``cudaMemcpyAsync`` between pinned host memory and the device,
measured in every round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from undercroft._core import Arena
from undercroft.device.api import Job
from undercroft.device.cuda import CudaCopier
from undercroft.device.lane import Lanes
from undercroft.device.layout import GroupCopy
from undercroft.device.streams import Streams
from undercroft.device.synthetic import synthetic_cache

RAW_BYTES = 256 << 20
JOB_BLOCKS = 64
MAX_JOBS = 16
STEP_JOBS = 16
"""Requests of a step that fill a block: 256 requests that decode, with blocks of 16 tokens."""
CACHE_SHARE = 0.6
"""How much of the device's free memory the KV cache takes."""
PAGE_ALIGN = 16
"""Pages of attention kernels are multiples of this many bytes."""
SLOT_ALIGN = 4096


class Case(NamedTuple):
    """One KV cache to copy."""

    layout: str
    layers: int
    block_bytes: int


GRID = tuple(
    Case(layout, layers, block_bytes)
    for layout in ("BLHNC", "LBHNC")
    for layers in (4, 32, 64, 80)
    for block_bytes in (32 << 10, 128 << 10, 512 << 10, 2 << 20, 4 << 20)
)


@dataclass(slots=True)
class Bench:
    """The device to measure and the sizes; only tests use smaller sizes."""

    lanes: Lanes
    device: torch.device
    arena: Arena
    pinned: Callable[[int], torch.Tensor]
    """Pinned host memory (uint8) of a size in bytes."""
    cache_bytes: int = 0
    """Size of the KV cache: the distance of pages changes the time of kernels. 0: as small as the jobs allow."""
    strategy: str = "auto"
    rounds: int = 7
    raw_bytes: int = RAW_BYTES
    matmul_size: int = 4096
    matmul_seconds: float = 0.05
    """Duration of the matrix products that run while copies are measured."""

    @property
    def streams(self) -> Streams:
        """The device's."""
        return self.lanes.save.streams

    def run(self, cases: Iterable[Case]) -> dict[str, Any]:
        """Measure every case. Speeds are medians in 1e9 bytes/s, shares the medians of the rounds' own ratios."""
        host = self.pinned(self.raw_bytes)
        stream = self.streams.create()
        on_device = torch.empty(self.raw_bytes, dtype=torch.uint8, device=self.device)
        ways: dict[str, Callable[[], float]] = {
            "save": lambda: self._on(stream, lambda: host.copy_(on_device, non_blocking=True)),
            "load": lambda: self._on(stream, lambda: on_device.copy_(host, non_blocking=True)),
        }
        for raw in ways.values():
            raw()
        results = [self._case(case, ways) for case in cases]
        return {
            "raw_bytes": self.raw_bytes,
            "job_blocks": JOB_BLOCKS,
            **{
                f"raw_{way}_gbps": self._gbps(self.raw_bytes, [raw() for _ in range(self.rounds)])
                for way, raw in ways.items()
            },
            "cases": results,
        }

    def _case(self, case: Case, raw: dict[str, Callable[[], float]]) -> dict[str, Any]:
        page, slot, jobs = _sizes(case, self.raw_bytes)
        block, half = page * case.layers, jobs * JOB_BLOCKS
        blocks = max(2 * half + 1, self.cache_bytes // block)
        cache = synthetic_cache(page, blocks, case.layers, case.layout, self.device)
        copier = CudaCopier(cache.layout, self.arena, self.lanes, None, strategy=self.strategy)
        order = np.random.default_rng(0)
        scattered = order.permutation(np.arange(1, blocks))

        def some(first: int) -> list[list[GroupCopy]]:
            ids = scattered[first : first + half]
            slots = order.permutation(np.arange(first, first + half) * slot)
            return [[GroupCopy(0, i, s)] for i, s in zip(np.split(ids, jobs), np.split(slots, jobs), strict=True)]

        saves = [(True, groups) for groups in some(0)]
        loads = [(False, groups) for groups in some(half)]
        both = [job for pair in zip(saves, loads, strict=True) for job in pair]
        work = {"save": saves, "load": loads, "both": both}
        for one in work.values():  # the first pass only brings buffers into being
            _timed(copier, one)
        seconds: dict[str, list[float]] = {way: [] for way in work}
        shares: dict[str, list[float]] = {way: [] for way in raw}
        ratios: list[float] = []
        python: list[float] = []
        for _ in range(self.rounds):
            bare = {way: self.raw_bytes / measure() for way, measure in raw.items()}
            for way, one in work.items():
                took, submitting = _timed(copier, one)
                seconds[way].append(took)
                python.append(submitting)
            for way in raw:
                shares[way].append(half * block / seconds[way][-1] / bare[way])
            ratios.append(2 * min(seconds["save"][-1], seconds["load"][-1]) / seconds["both"][-1])
        step = _step_us(copier, scattered[:STEP_JOBS], order.permutation(2 * half)[:STEP_JOBS] * slot, self.rounds)
        slowdown, covered = self._matmul_beside(copier, both, statistics.median(seconds["both"]))
        copier.close()
        return {
            "layout": case.layout,
            "layers": case.layers,
            "block_bytes": block,
            "jobs": jobs,
            "save_gbps": self._gbps(half * block, seconds["save"]),
            "load_gbps": self._gbps(half * block, seconds["load"]),
            "both_gbps": self._gbps(2 * half * block, seconds["both"]),
            "save_share": round(statistics.median(shares["save"]), 3),
            "load_share": round(statistics.median(shares["load"]), 3),
            "both_ratio": round(statistics.median(ratios), 3),
            "python_us_per_job": round(statistics.median(python) * 1e6, 1),
            "python_us_per_step": round(step, 1),
            "cache_bytes": blocks * block,
            "matmul_slowdown": round(slowdown, 4),
            "matmul_covered": covered,
        }

    def _matmul_beside(self, copier: CudaCopier, jobs: Sequence[Any], copies_seconds: float) -> tuple[float, bool]:
        """By how much copies both ways slow matrix products down; and whether they outlasted them, as they must."""
        size = self.matmul_size
        kind = torch.bfloat16
        left, right, out = (torch.ones(size, size, dtype=kind, device=self.device) for _ in range(3))
        compute = self.streams.compute()

        def products(count: int) -> float:
            def multiply() -> None:
                for _ in range(count):
                    torch.mm(left, right, out=out)

            return self._on(compute, multiply)

        products(3)
        count = max(1, math.ceil(self.matmul_seconds / (products(3) / 3)))
        slowdowns, covered = [], True
        repeats = math.ceil(1.5 * products(count) / copies_seconds)
        for _ in range(self.rounds):
            alone = products(count)
            # Copies wait for the work that the compute stream holds when they are submitted: none yet.
            for _ in range(repeats):
                for to_arena, groups in jobs:
                    copier.submit(to_arena, [Job(0, groups)])
            slowdowns.append(products(count) / alone - 1)
            covered = covered and len(copier.poll()) < repeats * len(jobs)
            copier.drain()
            copier.poll()
        return statistics.median(slowdowns), covered

    def _on(self, stream: Any, work: Callable[[], Any]) -> float:
        """Seconds on the device that ``work`` takes."""
        begin = self.streams.record(stream)
        self.streams.run(stream, work)
        end = self.streams.record(stream)
        self.streams.finish(stream)
        return self.streams.seconds(begin, end)

    @staticmethod
    def _gbps(size: int, seconds: Sequence[float]) -> float:
        return round(size / statistics.median(seconds) / 1e9, 3)


def run_cuda_copy_bench(
    cases: Sequence[Case] | None = None, *, strategy: str = "auto", rounds: int = 7
) -> dict[str, Any]:
    """Measure ``cases`` (default: the grid above) on the current CUDA device.

    Raises RuntimeError if there is no device, or if host memory cannot be pinned.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "no CUDA device is usable from this PyTorch "
            f"({torch.__version__}): run on a machine with an NVIDIA GPU, its driver, and a CUDA build of PyTorch, or "
            "measure copies in host memory with --device cpu"
        )
    from undercroft.device.cuda_streams import CudaStreams, pin

    device = torch.device("cuda", torch.cuda.current_device())
    lanes = Lanes.make(CudaStreams(device))
    arena = Arena.create(_arena_bytes(cases or GRID))
    pinner = pin(device, arena)
    try:
        pinner.wait()
        if pinner.pinned_bytes < arena.size:
            raise RuntimeError(f"only {pinner.pinned_bytes} of {arena.size} bytes of host memory could be pinned")

        def pinned(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

        free, _ = torch.cuda.mem_get_info(device)
        bench = Bench(lanes, device, arena, pinned, int(CACHE_SHARE * free), strategy, rounds)
        result = bench.run(cases or GRID)
    finally:
        pinner.close()
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "batched_copy": lanes.save.streams.copy_name,
        "strategy": strategy,
        **result,
    }


def _timed(copier: CudaCopier, jobs: Sequence[tuple[bool, list[GroupCopy]]]) -> tuple[float, float]:
    """Seconds until all jobs have ended, and seconds of the calling thread for each job."""
    begin = time.perf_counter()
    for ticket, (to_arena, groups) in enumerate(jobs):
        copier.submit(to_arena, [Job(ticket, groups)])
    submitted = time.perf_counter()
    copier.drain()
    end = time.perf_counter()
    ended = copier.poll()
    polled = time.perf_counter() - end
    if len(ended) != len(jobs) or not all(job.ok for job in ended):
        raise RuntimeError("a copy failed; the log says why")
    return end - begin, (submitted - begin + polled) / len(jobs)


def _step_us(copier: CudaCopier, block_ids: np.ndarray, slots: np.ndarray, rounds: int) -> float:
    """Microseconds of the calling thread for the saves of a step in which as many requests fill a block."""
    jobs = [Job(nth, [GroupCopy(0, block_ids[nth : nth + 1], slots[nth : nth + 1])]) for nth in range(len(block_ids))]
    took = []
    for _ in range(3 * rounds):
        begin = time.perf_counter()
        copier.submit(True, jobs)
        took.append(time.perf_counter() - begin)
        copier.drain()
        copier.poll()
    return statistics.median(took) * 1e6


def _sizes(case: Case, raw_bytes: int) -> tuple[int, int, int]:
    """Bytes of a page and of a slot, and how many jobs each direction gets."""
    page = case.block_bytes // case.layers // PAGE_ALIGN * PAGE_ALIGN
    if page == 0:
        raise ValueError(
            f"blocks of {case.block_bytes} bytes leave less than {PAGE_ALIGN} for each of {case.layers} layers"
        )
    block = page * case.layers
    return page, -(-block // SLOT_ALIGN) * SLOT_ALIGN, max(1, min(MAX_JOBS, raw_bytes // (JOB_BLOCKS * block)))


def _arena_bytes(cases: Iterable[Case], raw_bytes: int = RAW_BYTES) -> int:
    """Bytes of the slots of the largest case, both directions together."""
    return max(2 * JOB_BLOCKS * slot * jobs for _, slot, jobs in (_sizes(case, raw_bytes) for case in cases))
