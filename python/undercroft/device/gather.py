"""Pages scattered over device memory into one run of bytes for each block, and back, by PyTorch on the device.

Where a block is many small pages, one copy for each page would be all overhead. Gathered, a block is one copy.

The memory of the KV cache is seen as one table of equal rows, and a page as one row of it or several. PyTorch then
moves any number of pages in one kernel: a view with a dimension for the layers would span the whole cache, and PyTorch
cuts such work into one kernel for every 2 GiB spanned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from undercroft.device.layout import GroupLayout

_ELEMENTS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes are moved in the widest elements that fit; their meaning does not matter here."""
SMALLEST_ROW = 256
"""Pages smaller than this are rows themselves; others are cut into rows of no fewer bytes, or not gathered."""


@dataclass(frozen=True, slots=True)
class Gather:
    """The pages of one KV cache group, to be gathered into shards."""

    table: torch.Tensor
    """Device memory as [row, element]."""
    first: np.ndarray
    """For each row of a shard, its row of the table in block 0 (int64)."""
    step: np.ndarray
    """Rows of the table from one block to the next (int64)."""

    @classmethod
    def of(cls, layout: GroupLayout, tensors: Sequence[torch.Tensor]) -> Gather | None:
        """For the pages of ``layout``, which lie in the storages of ``tensors``.

        None if they do not fit one table: they lie in several storages, or at distances of no common measure.
        """
        base = int(layout.addresses.min())
        storage = _storage(layout, tensors)
        if storage is None:
            return None
        arrays = (layout.addresses - base, layout.strides, layout.sizes)
        row = math.gcd(*(int(value) for array in arrays for value in array))
        if row < min(SMALLEST_ROW, int(layout.sizes.min())):
            return None
        skipped = base - storage.data_ptr()
        dtype = _ELEMENTS[math.gcd(16, row, skipped, storage.data_ptr())]
        rows, width = (storage.nbytes() - skipped) // row, row // dtype.itemsize
        table = torch.empty(0, dtype=dtype, device=tensors[0].device)
        table.set_(storage, skipped // dtype.itemsize, (rows, width), (width, 1))
        counts = layout.sizes // row
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat((layout.addresses - base) // row, counts) + within
        return cls(table, first, np.repeat(layout.strides // row, counts))

    @property
    def rows_per_block(self) -> int:
        """Row numbers that one block takes."""
        return int(self.first.size)

    def rows(self, block_ids: np.ndarray) -> np.ndarray:
        """The numbers of the rows of the blocks, block after block, as `gather` and `scatter` take them."""
        rows: np.ndarray = block_ids[:, None] * self.step + self.first
        return rows.reshape(-1)

    def gather(self, rows: torch.Tensor, shards: torch.Tensor) -> None:
        """Copy the rows (their numbers, on the device) into ``shards``, uint8 [block, byte of the shard]."""
        torch.index_select(self.table, 0, rows, out=self._like_table(shards))

    def scatter(self, rows: torch.Tensor, shards: torch.Tensor) -> None:
        """Copy ``shards`` into the rows, each of which may occur once."""
        self.table.index_copy_(0, rows, self._like_table(shards))

    def _like_table(self, shards: torch.Tensor) -> torch.Tensor:
        return shards.view(-1).view(self.table.dtype).view(-1, self.table.shape[1])


def _storage(layout: GroupLayout, tensors: Sequence[torch.Tensor]) -> torch.UntypedStorage | None:
    """The one storage that holds all pages."""
    ends = layout.addresses + (layout.num_blocks - 1) * layout.strides + layout.sizes
    begin, end = int(layout.addresses.min()), int(ends.max())
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() <= begin and end <= storage.data_ptr() + storage.nbytes():
            return storage
    return None
