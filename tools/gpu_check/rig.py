"""The device under test, and KV caches on it that copies run between and an arena."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from undercroft._core import Arena
from undercroft.device.api import GATHER_BELOW, DeviceCopier, Job
from undercroft.device.factory import make_copier, pin_arena
from undercroft.device.layout import GroupCopy, Part
from undercroft.device.synthetic import SyntheticCache, synthetic_cache

SLOT_ALIGN = 4096
TOTAL_S = 180.0
"""After this time no further part begins, and a part that runs makes only the fewest rounds."""
FEWEST_ROUNDS = 2
SPIN_CYCLES = 20_000_000
"""About 10 ms of a GPU."""


@dataclass(frozen=True)
class Rig:
    """A device. On the CPU, which only tests use, everything happens at once."""

    device: torch.device
    small: bool = False
    """Tiny sizes and few rounds: shows that the check itself works, and nothing else."""
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Progress, for people."""
        print(f"[{time.monotonic() - self.started:5.1f} s] {text}", file=sys.stderr, flush=True)

    def pick(self, large: int, small: int) -> int:
        """A size."""
        return small if self.small else large

    def is_over(self) -> bool:
        """Whether the check has taken the time that it may take."""
        return time.monotonic() - self.started > TOTAL_S

    def rounds(self, large: int, small: int) -> Iterator[int]:
        """The rounds of a measurement: fewer of them on a device that is so slow that the time is over."""
        for nth in range(self.pick(large, small)):
            if nth >= FEWEST_ROUNDS and self.is_over():
                return
            yield nth

    def wait(self) -> None:
        """Wait for everything that runs on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait_for_model(self) -> None:
        """Wait for the calling thread's own work on the device, not for copies."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def spin(self) -> None:
        """Keep the model's stream busy for a while, so that work that does not wait for the stream comes too early."""
        if self.device.type == "cuda":
            torch.cuda._sleep(SPIN_CYCLES)

    def host(self, size: int) -> torch.Tensor:
        """Host memory that the device copies from and to at its full speed."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def free_bytes(self) -> int:
        """Device memory that is free."""
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.device.type == "cuda" else 1 << 30


class NothingPinned:
    """Stands in for a pinner of which nothing is pinned yet."""

    pinned_bytes = 0


@dataclass
class Copying:
    """A copier between a KV cache and an arena."""

    rig: Rig
    cache: SyntheticCache
    arena: Arena
    copier: DeviceCopier
    slot: int
    """Bytes from one slot to the next."""
    page: int
    rank: int = 0
    tickets: int = 0
    held: torch.Tensor | None = None
    """Host memory that the device may still read."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on this rank."""
        return sum(pages.shape[1] for pages in self.cache.pages)

    def submit(self, to_arena: bool, jobs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Queue jobs of a step, each given by its blocks and its slots."""
        numbered = [
            Job(self.tickets + nth, [GroupCopy(0, blocks, slots * self.slot)])
            for nth, (blocks, slots) in enumerate(jobs)
        ]
        self.tickets += len(jobs)
        self.copier.submit(to_arena, numbered)

    def ended(self) -> int:
        """Number of jobs that have ended since the last call. Raises RuntimeError if one failed."""
        ended = self.copier.poll()
        if not all(job.ok for job in ended):
            raise RuntimeError("a copy failed; the log above says why")
        return len(ended)

    def finish(self) -> None:
        """Wait until every job has ended. Raises RuntimeError if one failed."""
        self.copier.drain()
        self.ended()

    def arena_bytes(self, slot: int) -> np.ndarray:
        """The bytes in this rank's part of a slot now."""
        begin = self.arena.address + slot * self.slot + self.rank * self.block_bytes
        return np.frombuffer((ctypes.c_uint8 * self.block_bytes).from_address(begin), dtype=np.uint8).copy()


@contextlib.contextmanager
def copying(
    rig: Rig,
    layout: str,
    layers: int,
    page: int,
    blocks: int,
    slots: int,
    *,
    pinned: bool = True,
    ranks: int = 1,
    rank: int = 0,
    arena: Arena | None = None,
    gather_below: int = GATHER_BELOW,
) -> Iterator[Copying]:
    """A KV cache of ``blocks`` blocks, an arena (a new one, if none is given) of ``slots`` slots, and a copier.

    At the end cache and copier are taken away from the object. ``gather_below``: smaller pages are gathered on the
    device (bytes).
    """
    slot = -(-page * layers * ranks // SLOT_ALIGN) * SLOT_ALIGN
    part = Part(rank, ranks, by_heads=False)
    cache = synthetic_cache(page, blocks, layers, layout, rig.device, part)
    arena = arena or Arena.create(slot * slots)
    pinner: Any = pin_arena(rig.device, arena) if pinned else NothingPinned()
    try:
        if pinned and pinner is not None:
            pinner.wait()
            if pinner.pinned_bytes < arena.size:
                raise RuntimeError(f"only {pinner.pinned_bytes} of {arena.size} bytes of host memory could be pinned")
        one = Copying(rig, cache, arena, make_copier(cache.layout, arena, pinner, gather_below), slot, page, rank)
        del cache
        try:
            yield one
        finally:
            one.copier.close()
            # In a loop the caller's variable still names this object while the next cache is made.
            del one.cache, one.copier
    finally:
        if pinned and pinner is not None:
            pinner.close()
        if rig.device.type == "cuda":
            torch.cuda.empty_cache()
