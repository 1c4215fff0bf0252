"""The cost of copies and pinning to the model: slower decode steps, and launches that wait."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from gpu_check.report import Row, at_most, right
from gpu_check.rig import Copying, Rig, copying
from undercroft._core import Arena
from undercroft.device.factory import pin_arena

SLOWDOWN_PERCENT = 2.0
STALL_MS = 5.0
LAUNCH_PAUSE_S = 0.0002
JOBS = 4
"""Jobs that are under way in each step beside copies: 512 MiB, about 10 ms of the bus."""


class Decode:
    """Steps like those of decoding: they read a lot of weights from device memory and compute little."""

    def __init__(self, rig: Rig) -> None:
        rows = rig.pick(4096, 64)
        layers = rig.pick(64, 2)
        self._rig = rig
        kind = torch.bfloat16
        self._weights = [torch.empty(rows, rows, dtype=kind, device=rig.device) for _ in range(layers)]
        self._sums = torch.empty(rows, dtype=kind, device=rig.device)

    def step(self) -> float:
        """Seconds of one step, from its first launch until the device has ended it."""
        begin = time.perf_counter()
        for weights in self._weights:
            torch.sum(weights, dim=1, out=self._sums)
        self._rig.wait_for_model()
        return time.perf_counter() - begin


def decode(rig: Rig) -> list[Row]:
    """Decode steps beside saves, and beside loads: each against the same steps alone, in turns."""
    rows = []
    for layout in ("BLHNC", "LBHNC"):
        many = rig.pick(256, 4)
        with copying(rig, layout, 32, rig.pick(64 << 10, 4 << 10), 2 * many + 1, many) as one:
            model = Decode(rig)
            for to_arena, word in ((True, "saves"), (False, "loads")):
                rig.say(f"decode beside {word}, {layout}")
                slower, gap = _beside(rig, one, model, many, to_arena=to_arena)
                rows.append(at_most(f"{layout}: decode slowed down by {word}", slower, SLOWDOWN_PERCENT, "%"))
                rows.append(Row(f"{layout}: longest step beside {word}, over the median alone", gap, "x"))
    return rows


def _beside(rig: Rig, one: Copying, model: Decode, many: int, *, to_arena: bool) -> tuple[float, float]:
    """By how many percent the median step is slower; and the longest step over the median of steps alone."""
    ids, slots = np.arange(1, many + 1), np.arange(many)
    jobs = deque(zip(np.split(ids, JOBS), np.split(slots, JOBS), strict=True))
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(3):
        model.step()
    for _ in rig.rounds(20, 2):
        alone += [model.step() for _ in range(rig.pick(20, 3))]
        ended = JOBS
        for _ in range(rig.pick(20, 3)):
            # Only jobs that have ended are submitted again: the bus is always busy, and copies never pile up.
            if ended:
                one.submit(to_arena, [jobs[nth] for nth in range(ended)])
                jobs.rotate(-ended)
            beside.append(model.step())
            ended = one.ended()
        one.finish()
    middle = statistics.median(alone)
    return round((statistics.median(beside) / middle - 1) * 100, 2), round(max(beside) / middle, 2)


def pinning(rig: Rig) -> list[Row]:
    """Launches beside the registration of an arena, as it happens at start."""
    size = rig.pick(8 << 30, 8 << 20)
    rig.say(f"pinning {size >> 20} MiB beside launches")
    arena = Arena.create(size)
    alone = launches(rig, lambda: time.sleep(rig.pick(1000, 20) / 1e3))
    free = rig.free_bytes()
    pinners = []
    begin = time.perf_counter()

    def register() -> None:
        pinner = pin_arena(rig.device, arena)
        if pinner is not None:
            pinners.append(pinner)
            pinner.wait()

    beside = launches(rig, register)
    took = time.perf_counter() - begin
    used = max(0, free - rig.free_bytes())
    pinned = sum(pinner.pinned_bytes for pinner in pinners) if pinners else size
    begin = time.perf_counter()
    for pinner in pinners:
        pinner.close()
    released = time.perf_counter() - begin
    gib = size / (1 << 30)
    return [
        right("the whole arena is pinned", pinned == size, f"{pinned >> 20} of {size >> 20} MiB"),
        at_most("longest launch while pinning", beside[2], STALL_MS, "ms"),
        Row("99th percentile of launches while pinning", beside[1], "ms"),
        Row("longest launch alone", alone[2], "ms"),
        Row("pinning, pauses included", round(took / gib, 3), "s/GiB"),
        Row("unpinning", round(released / gib, 3), "s/GiB"),
        Row("device memory for 64 GiB pinned", round(used / gib * 64 / (1 << 20), 1), "MiB"),
    ]


def unpinned(rig: Rig) -> list[Row]:
    """Launches beside copies of memory that is not pinned, which the driver makes its caller wait for."""
    rig.say("copies of unpinned memory beside launches")
    many = rig.pick(128, 4)
    with copying(rig, "LBHNC", 32, rig.pick(64 << 10, 4 << 10), many + 1, many, pinned=False) as one:
        jobs = [(np.arange(1, many + 1), np.arange(many))]

        def work() -> None:
            for _ in range(rig.pick(8, 2)):
                one.submit(True, jobs)
                one.submit(False, jobs)
            one.copier.drain()

        work()
        beside = launches(rig, work)
        one.finish()
    return [
        at_most("longest launch beside unpinned copies", beside[2], STALL_MS, "ms"),
        Row("99th percentile", beside[1], "ms"),
    ]


def launches(rig: Rig, work: Callable[[], None]) -> tuple[float, float, float]:
    """Milliseconds of tiny launches of this thread while ``work`` runs in another: median, 99th percentile, longest."""
    tiny = torch.zeros(8, device=rig.device)
    errors: list[Exception] = []

    def run() -> None:
        if rig.device.type == "cuda":
            torch.cuda.set_device(rig.device)
        try:
            work()
        except Exception as error:
            errors.append(error)

    tiny.add_(1)
    rig.wait()
    thread = threading.Thread(target=run)
    took = []
    thread.start()
    while thread.is_alive() or not took:
        begin = time.perf_counter()
        tiny.add_(1)
        rig.wait_for_model()
        took.append((time.perf_counter() - begin) * 1e3)
        time.sleep(LAUNCH_PAUSE_S)
    thread.join()
    if errors:
        raise errors[0]
    low, high, longest = (round(float(value), 3) for value in np.percentile(took, (50, 99, 100)))
    return low, high, longest
