"""Questions that only a device answers: copies beside a prefill, the border of gathering, many batches, far pages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from gpu_check.interference import launches
from gpu_check.report import Row, at_least, at_most, right
from gpu_check.rig import Copying, Rig, copying
from undercroft._core import Arena

BESIDE = (8 << 10, 32 << 10, 64 << 10)
"""Bytes of pages whose speed is measured beside a prefill."""
SWEEP = tuple(1 << power for power in range(12, 19))
"""Bytes of pages between which the border between gathering and direct copies may be."""
GATHERED, DIRECT = 1 << 30, 0
"""Values of ``gather_below``: all pages are gathered, or none."""
WAYS = {"gathered": GATHERED, "direct": DIRECT}
LAYERS = 32
BESIDE_SHARE = 0.9
SLOWDOWN_PERCENT = 2.0
BATCHES = 5000
BATCH = 1024
"""Copies of a batch: a driver has crashed and hung at repeated large ones."""
STALL_MS = 5.0
FAR_SHARE = 0.6
"""Share of the free device memory that the cache of the round trips takes."""
FAR_BYTES = {"2^31 bytes": 1 << 31, "2^31 elements of 16 bytes": 1 << 35}
"""Kernels count rows in elements of up to 16 bytes."""
FAR_BLOCKS = 16
CHUNKS = (32 << 20, 128 << 20, 512 << 20)


def far(rig: Rig) -> list[Row]:
    """Blocks at the start, beyond 2^31 elements and at the end of a cache that takes most of the device's memory."""
    page = 8 << 10
    blocks = rig.pick(int(rig.free_bytes() * FAR_SHARE) // (page * LAYERS), 400)
    rows = []
    for layout in ("LBHNC", "BLHNC"):
        for way, below in WAYS.items():
            with copying(rig, layout, LAYERS, page, blocks, FAR_BLOCKS, gather_below=below) as one:
                for place, first in _places(rig, layout, page, blocks).items():
                    rig.say(f"bytes at {place}: {layout}, {way}")
                    found = _far_round_trip(one, first)
                    rows.append(right(f"{layout}, {way}: blocks at {place}", not found, found))
    return rows


def _places(rig: Rig, layout: str, page: int, blocks: int) -> dict[str, int]:
    """First blocks of the round trips. Block 0 is left alone, as vLLM's null block is."""
    places = {"the start": 1, "the end": blocks - FAR_BLOCKS}
    for name, offset in ({"2^20 bytes": 1 << 20} if rig.small else FAR_BYTES).items():
        if offset < blocks * page * LAYERS:
            in_layer = offset % (page * blocks) // page if layout.startswith("L") else offset // (page * LAYERS)
            places[name] = min(max(1, in_layer - FAR_BLOCKS // 2), blocks - FAR_BLOCKS)
    return places


def _far_round_trip(one: Copying, first: int) -> str:
    """The first error of a save and a load of blocks from ``first`` on; empty if there was none."""
    ids, slots = np.arange(first, first + FAR_BLOCKS), np.arange(FAR_BLOCKS)
    host = np.random.default_rng(first).integers(-128, 128, (LAYERS, FAR_BLOCKS, one.page), dtype=np.int8)
    _write(one, first, host)
    one.submit(True, [(ids, slots)])
    one.finish()
    for slot in range(FAR_BLOCKS):
        if not np.array_equal(one.arena_bytes(slot).view(np.int8), host[:, slot].reshape(-1)):
            return f"block {first + slot}: other bytes were saved"
    _write(one, first, np.zeros_like(host))
    one.submit(False, [(ids[::-1].copy(), slots)])
    one.finish()
    for layer, pages in enumerate(one.cache.pages):
        for nth in range(FAR_BLOCKS):
            if not np.array_equal(pages[first + nth].cpu().numpy(), host[layer, FAR_BLOCKS - 1 - nth]):
                return f"layer {layer}, block {first + nth}: other bytes after the load"
    return ""


def _write(one: Copying, first: int, host: np.ndarray) -> None:
    """Write pages, each by a plain copy: no kernel addresses them."""
    for pages, rows in zip(one.cache.pages, host, strict=True):
        for nth, row in enumerate(rows):
            pages[first + nth].copy_(torch.from_numpy(row))


class Prefill:
    """A queue of bf16 products, like those of a prefill."""

    def __init__(self, rig: Rig) -> None:
        size = rig.pick(8192, 64)
        self._rig = rig
        self._left, self._right, self._out = (
            torch.ones(size, size, dtype=torch.bfloat16, device=rig.device) for _ in range(3)
        )
        self.run(3)
        self.seconds = self.run(rig.pick(20, 2)) / rig.pick(20, 2)
        """Of one product."""

    def queue(self, products: int) -> None:
        """Only queues them."""
        for _ in range(products):
            torch.mm(self._left, self._right, out=self._out)

    def run(self, products: int) -> float:
        """Seconds until so many have ended."""
        begin = time.perf_counter()
        self.queue(products)
        self._rig.wait_for_model()
        return time.perf_counter() - begin


def _caches(rig: Rig, pages: tuple[int, ...], size: int) -> Iterator[tuple[str, int, Copying, list[list[np.ndarray]]]]:
    """For each size of a page and way of copying: a copier with blocks for ``size`` bytes, and their one job."""
    for page in pages:
        many = max(2, size // (page * LAYERS))
        order = np.random.default_rng(0)
        for way, below in WAYS.items():
            with copying(rig, "LBHNC", LAYERS, page, 2 * many + 1, many, gather_below=below) as one:
                ids, slots = order.permutation(np.arange(1, 2 * many + 1))[:many], order.permutation(many)
                yield way, page, one, [[ids, slots]]


def beside_prefill(rig: Rig) -> list[Row]:
    """Copies while products run: their speed as a share of their own speed alone, and the products' slowdown."""
    prefill = Prefill(rig)
    size = rig.pick(1 << 30, 1 << 20)
    rows = _plain_beside(rig, prefill, size)
    for way, page, one, [[ids, slots]] in _caches(rig, BESIDE, size):
        for to_arena, word in ((True, "saves"), (False, "loads")):
            name = f"{page >> 10} KiB, {way}, {word}"
            rig.say(f"beside a prefill: {name}")
            # Copies wait for the work that is queued before them: none yet.
            start = partial(one.submit, to_arena, [(ids, slots)])
            share, slower = _beside(rig, prefill, start, one.finish)
            rows.append(at_least(f"{name}: speed over that alone", share, BESIDE_SHARE))
            rows.append(Row(f"{name}: products slowed down", slower, "%"))
    return rows


def _plain_beside(rig: Rig, prefill: Prefill, size: int) -> list[Row]:
    """One copy of pinned memory while products run: what the device leaves to any copy."""
    host, device = rig.host(size), torch.empty(size, dtype=torch.uint8, device=rig.device)
    stream = torch.cuda.Stream(rig.device) if rig.device.type == "cuda" else None
    rows = []
    for word, to, source in (("save", host, device), ("load", device, host)):

        def start(to: torch.Tensor = to, source: torch.Tensor = source) -> None:
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)

        share, slower = _beside(rig, prefill, start, stream.synchronize if stream is not None else lambda: None)
        rows.append(Row(f"a plain {word}: speed over that alone", share))
        rows.append(Row(f"a plain {word}: products slowed down", slower, "%"))
    return rows


def _beside(rig: Rig, prefill: Prefill, start: Callable[[], object], finish: Callable[[], None]) -> tuple[float, float]:
    """The speed of copies beside products as a share of that alone, and by how many percent the products are slower."""

    def alone() -> float:
        begin = time.perf_counter()
        start()
        finish()
        return time.perf_counter() - begin

    bare = min(alone() for _ in range(2))
    # The queue outlasts the copies, also if they are slowed down to a fifth.
    count = 4 if rig.small else max(4, int(5 * bare / prefill.seconds))
    shares, slower = [], []
    for _ in rig.rounds(3, 1):
        products = prefill.run(count)
        begin = time.perf_counter()
        start()
        prefill.queue(count)
        finish()
        shares.append(bare / (time.perf_counter() - begin))
        rig.wait_for_model()
        slower.append(((time.perf_counter() - begin) / products - 1) * 100)
    return _middle(shares), _middle(slower)


def sweep(rig: Rig) -> list[Row]:
    """Copies on an idle device for each size of a page: where direct copies become as fast as gathered ones."""
    speeds: dict[tuple[int, str, str], float] = {}
    for way, page, one, [[ids, slots]] in _caches(rig, SWEEP, rig.pick(256 << 20, 1 << 20)):
        for to_arena, word in ((True, "saves"), (False, "loads")):
            rig.say(f"border: {page >> 10} KiB, {way}, {word}")
            _copy(one, to_arena, ids, slots)
            took = min(_copy(one, to_arena, ids, slots) for _ in rig.rounds(3, 1))
            speeds[page, word, way] = round(ids.size * one.block_bytes / took / 1e9, 2)
    rows = [Row(f"{page >> 10} KiB, {word}, {way}", speed, "GB/s") for (page, word, way), speed in speeds.items()]
    for word in ("saves", "loads"):
        direct = [page for page in SWEEP if speeds[page, word, "direct"] >= 0.97 * speeds[page, word, "gathered"]]
        rows.append(Row(f"least page at which direct {word} reach 0.97 of gathered ones", min(direct, default=0), "B"))
    return rows


def _copy(one: Copying, to_arena: bool, ids: np.ndarray, slots: np.ndarray) -> float:
    begin = time.perf_counter()
    one.submit(to_arena, [(ids, slots)])
    one.finish()
    return time.perf_counter() - begin


def beside_python(rig: Rig) -> list[Row]:
    """Copies beside a thread that runs Python without a pause, as a busy scheduler does: it keeps Python's lock."""
    rows = []
    for way, page, one, [[ids, slots]] in _caches(rig, (8 << 10, 64 << 10), rig.pick(512 << 20, 1 << 20)):
        for to_arena, word in ((True, "saves"), (False, "loads")):
            name = f"{page >> 10} KiB, {way}, {word}"
            rig.say(f"beside Python: {name}")
            alone = min(_copy(one, to_arena, ids, slots) for _ in rig.rounds(3, 1))
            begin = time.perf_counter()
            one.submit(to_arena, [(ids, slots)])
            while not one.copier.poll():
                pass
            rows.append(Row(f"{name}: speed over that alone", round(alone / (time.perf_counter() - begin), 3)))
    return rows


def batches(rig: Rig) -> list[Row]:
    """Thousands of batches of direct copies, loads and saves in turn, and the launches beside them."""
    many = rig.pick(BATCH, 64)
    page, count = 8 << 10, rig.pick(BATCHES, 20)
    rig.say(f"{count} batches of {many} copies")
    # One layer, and blocks that lie apart in the arena: each is a copy.
    with copying(rig, "LBHNC", 1, page, 2 * many + 1, 2 * many, gather_below=DIRECT) as one:
        ids, slots = np.arange(1, 2 * many, 2), np.arange(0, 2 * many, 2)

        def work() -> None:
            for nth in range(count):
                one.submit(nth % 2 == 0, [(ids, slots)])
                if nth % 8 == 7:
                    one.copier.drain()
            one.copier.drain()

        expected = np.random.default_rng(0).integers(-128, 128, tuple(one.cache.pages[0].shape), dtype=np.int8)
        one.cache.pages[0].copy_(torch.from_numpy(expected))
        # Saves and loads do not wait for each other, so both move the same bytes from now on.
        _copy(one, True, ids, slots)
        begin = time.perf_counter()
        _, _, longest = launches(rig, work)
        took = time.perf_counter() - begin
        one.finish()
        same = np.array_equal(one.cache.pages[0].cpu().numpy(), expected)
    return [
        right("the bytes after all batches", same),
        Row("a batch", round(took / count * 1e6, 1), "us"),
        at_most("longest launch beside batches", longest, STALL_MS, "ms"),
    ]


def chunks(rig: Rig) -> list[Row]:
    """Registrations of host memory by the size of a chunk."""
    if rig.device.type != "cuda":
        return [Row("not a CUDA device: nothing is registered", "")]
    size = rig.pick(4 << 30, 8 << 20)
    rows = []
    runtime = torch.cuda.cudart()
    for chunk in (rig.pick(chunk, chunk >> 9) for chunk in CHUNKS):
        rig.say(f"registrations of {chunk >> 10} KiB")
        arena = Arena.create(size)
        arena.prefault(0, size)

        def register(chunk: int = chunk, arena: Arena = arena) -> None:
            for start in range(arena.address, arena.address + size, chunk):
                if code := int(runtime.cudaHostRegister(start, min(chunk, arena.address + size - start), 1)):
                    raise RuntimeError(f"cudaHostRegister failed with error {code}")

        begin = time.perf_counter()
        _, _, longest = launches(rig, register)
        took = time.perf_counter() - begin
        for start in range(arena.address, arena.address + size, chunk):
            runtime.cudaHostUnregister(start)
        rows.append(Row(f"registering by {chunk >> 10} KiB", round(took / size * (1 << 30), 3), "s/GiB"))
        rows.append(Row(f"longest launch beside {chunk >> 10} KiB", longest, "ms"))
    return rows


def _middle(values: list[float]) -> float:
    return round(statistics.median(values), 3)
