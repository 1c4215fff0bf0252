"""Random saves, loads, cancellations and reuse of blocks, as vLLM would order them, checked to the byte.

The caller supplies the device: work that is given to ``enqueue`` runs in order on the stream that the model uses.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from undercroft._core import Arena
from undercroft.device.api import DeviceCopier
from undercroft.device.api import Job as CopyJob
from undercroft.device.layout import GroupCopy
from undercroft.device.synthetic import SyntheticCache


@dataclass
class Job:
    saves: bool
    blocks: list[int]
    slots: list[int]
    values: list[int]
    cancelled: bool = False


class Workload:
    def __init__(
        self,
        copier: DeviceCopier,
        cache: SyntheticCache,
        arena: Arena,
        enqueue: Callable[[Callable[[], None]], None],
        tick: Callable[[], None],
        seed: int,
        slot_bytes: int | None = None,
        stage: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        """``stage``: puts a tensor where the device can copy it from without the caller waiting."""
        self.copier, self.cache, self.arena = copier, cache, arena
        self.enqueue, self.tick, self.stage = enqueue, tick, stage
        self.random = random.Random(seed)
        group = cache.layout.groups[0]
        self.shard = group.shard_bytes
        step = slot_bytes or self.shard
        self.blocks = list(range(1, group.num_blocks))
        self.slots = [slot * step for slot in range(arena.size // step)]
        self.visible: dict[int, int] = {}
        self.running: dict[int, Job] = {}
        self.reads: list[tuple[str, int, list[torch.Tensor]]] = []
        self.next_number = 1
        self.ended = {"saved": 0, "loaded": 0, "cancelled": 0, "failed": 0}

    def run(self, steps: int) -> None:
        actions = [self.compute_and_save, self.load, self.cancel, self.evict, self.poll, self.tick, self.tick]
        for _ in range(steps):
            self.random.choice(actions)()
        self.copier.drain()
        self.poll()
        assert not self.running, "jobs that never end"

    def check(self) -> None:
        """Check the bytes that the model has read, after everything has run on the device."""
        for what, value, parts in self.reads:
            found = b"".join(part.cpu().numpy().tobytes() for part in parts)
            assert found == self.content(value), f"the model read wrong bytes: {what}"

    def content(self, value: int) -> bytes:
        return np.random.default_rng(value).bytes(self.shard)

    def compute_and_save(self) -> None:
        """A step that saves for one request or two."""
        self._submit([job for _ in range(self.random.randint(1, 2)) if (job := self._save()) is not None])

    def load(self) -> None:
        """The same with loads."""
        self._submit([job for _ in range(self.random.randint(1, 2)) if (job := self._load()) is not None])

    def _save(self) -> Job | None:
        count = min(self.random.randint(1, 3), len(self.blocks), len(self.slots))
        if count == 0:
            return None
        blocks, slots = self._take(self.blocks, count), self._take(self.slots, count)
        values = [self._number() for _ in blocks]
        for block, value in zip(blocks, values, strict=True):
            self._write(block, self.content(value))
        return Job(True, blocks, slots, values)

    def _load(self) -> Job | None:
        count = min(self.random.randint(1, 3), len(self.blocks), len(self.visible))
        if count == 0:
            return None
        slots = self.random.sample(sorted(self.visible), count)
        blocks = self._take(self.blocks, count)
        for block in blocks:
            self._write(block, bytes(self.shard))
        return Job(False, blocks, slots, [self.visible[slot] for slot in slots])

    def cancel(self) -> None:
        loads = [job for job in self.running.values() if not job.saves]
        if loads:
            self.random.choice(loads).cancelled = True

    def evict(self) -> None:
        used = {slot for job in self.running.values() for slot in job.slots}
        idle = [slot for slot in self.visible if slot not in used]
        if idle:
            slot = self.random.choice(idle)
            del self.visible[slot]
            self.slots.append(slot)

    def poll(self) -> None:
        for ticket, ok, _seconds in self.copier.poll():
            job = self.running.pop(ticket)
            if job.saves:
                self._saved(job, ok)
            else:
                self._loaded(job, ok)
            # From here on others may write the blocks.
            self.blocks += job.blocks

    def _saved(self, job: Job, ok: bool) -> None:
        if not ok:
            self.ended["failed"] += 1
            self.slots += job.slots
            return
        self.ended["saved"] += 1
        for slot, value in zip(job.slots, job.values, strict=True):
            found = ctypes.string_at(self.arena.address + slot, self.shard)
            assert found == self.content(value), f"wrong bytes saved from block {job.blocks} to slot {slot}"
            self.visible[slot] = value

    def _loaded(self, job: Job, ok: bool) -> None:
        if not ok or job.cancelled:
            self.ended["cancelled" if ok else "failed"] += 1
            return
        self.ended["loaded"] += 1
        for block, slot, value in zip(job.blocks, job.slots, job.values, strict=True):
            parts: list[torch.Tensor] = []
            self.enqueue(lambda block=block, parts=parts: parts.extend(p[block].clone() for p in self.cache.pages))
            self.reads.append((f"block {block} from slot {slot}", value, parts))

    def _write(self, block: int, content: bytes) -> None:
        layers = len(self.cache.pages)
        rows = self.stage(torch.frombuffer(bytearray(content), dtype=torch.int8)).view(layers, -1)

        def write() -> None:
            for pages, row in zip(self.cache.pages, rows, strict=True):
                pages[block].copy_(row, non_blocking=True)

        self.enqueue(write)

    def _submit(self, jobs: list[Job]) -> None:
        tickets = [self._number() for _ in jobs]
        self.running.update(zip(tickets, jobs, strict=True))
        copies = [[GroupCopy(0, np.array(job.blocks), np.array(job.slots))] for job in jobs]
        if jobs:
            submitted = [CopyJob(*job) for job in zip(tickets, copies, strict=True)]
            queued = self.copier.submit(jobs[0].saves, submitted)
            assert queued == [len(job.blocks) * self.shard for job in jobs]

    def _number(self) -> int:
        self.next_number += 1
        return self.next_number

    def _take(self, pool: list[int], count: int) -> list[int]:
        return [pool.pop(self.random.randrange(len(pool))) for _ in range(count)]
