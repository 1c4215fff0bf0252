"""Whether blocks come back as they were saved, in every layout and in every way of copying."""

from __future__ import annotations

import numpy as np
import torch

from gpu_check.report import Row, right
from gpu_check.rig import Copying, Rig, copying
from undercroft._core import Arena
from undercroft.device.layout import SUPPORTED_LAYOUTS

LAYERS = 5
PAGES = (8 << 10, 160 << 10)
"""Bytes of a page: one that is gathered, one that is copied as it is."""
BLOCKS = 48


def check(rig: Rig) -> list[Row]:
    """A row for each layout, size of page, and kind of host memory."""
    rows = []
    blocks = rig.pick(BLOCKS, 12)
    for layout in SUPPORTED_LAYOUTS:
        for page in PAGES:
            for pinned in (True, False):
                name = f"{layout}, pages of {page >> 10} KiB, {'pinned' if pinned else 'not pinned'}"
                rig.say(f"correctness: {name}")
                with copying(rig, layout, LAYERS, page, blocks, blocks, pinned=pinned) as one:
                    found = round_trip(one, blocks, seed=len(rows))
                rows.append(right(name, not found, found))
    return rows


def round_trip(one: Copying, blocks: int, seed: int, slots: int | None = None) -> str:
    """The first error; empty if there was none. Block 0 is left alone, as vLLM's null block is."""
    order = np.random.default_rng(seed)
    wrote = _fill(one, order)
    some = order.permutation(np.arange(1, blocks))[: blocks // 2]
    places = order.permutation(blocks if slots is None else slots)[: some.size]
    # As vLLM submits them: several jobs in a step, behind work that has not run yet.
    one.submit(True, list(zip(np.array_split(some, 3), np.array_split(places, 3), strict=True)))
    one.finish()
    for block, slot in zip(some.tolist(), places.tolist(), strict=True):
        if not np.array_equal(one.arena_bytes(slot), np.concatenate([pages[block] for pages in wrote])):
            return f"block {block}: other bytes were saved"
    others = _fill(one, order)
    targets = order.permutation(np.arange(1, blocks))[: some.size]
    one.submit(False, list(zip(np.array_split(targets, 3), np.array_split(places, 3), strict=True)))
    one.finish()
    found = _views(one, _storage(one).cpu())
    for layer, pages in enumerate(found):
        expected = others[layer].copy()
        expected[targets] = wrote[layer][some]
        if not np.array_equal(pages, expected):
            block = int(np.flatnonzero((pages != expected).any(axis=1))[0])
            return f"layer {layer}, block {block}: other bytes after the load"
    return ""


def _fill(one: Copying, order: np.random.Generator) -> list[np.ndarray]:
    """Write new bytes into every page, on the model's stream, behind a kernel that takes its time; the pages' bytes."""
    storage = _storage(one)
    here = one.rig.host(storage.numel())
    here.numpy()[:] = order.integers(0, 256, storage.numel(), dtype=np.uint8)
    one.rig.spin()
    storage.copy_(here, non_blocking=True)
    one.held = here
    return _views(one, here)


def _storage(one: Copying) -> torch.Tensor:
    """All of the KV cache as one run of bytes: a plain copy moves it, whatever the layout."""
    storage = one.cache.pages[0].untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=one.rig.device).set_(storage)


def _views(one: Copying, storage: torch.Tensor) -> list[np.ndarray]:
    """The pages of each layer in a copy of the storage."""
    return [
        storage.as_strided(pages.shape, pages.stride(), pages.storage_offset()).numpy().copy()
        for pages in one.cache.pages
    ]


def ranks_round_trip(rig: Rig, arena: Arena, rank: int, ranks: int, blocks: int) -> str:
    """The same for one of several ranks that share an arena, each at the same time in its own part of every slot."""
    with copying(rig, "LBHNC", LAYERS, PAGES[0], blocks, 0, ranks=ranks, rank=rank, arena=arena) as one:
        slots = arena.size // one.slot
        for seed in range(rig.pick(20, 3)):
            if found := round_trip(one, blocks, seed=seed, slots=min(slots, blocks)):
                return found
    return ""
