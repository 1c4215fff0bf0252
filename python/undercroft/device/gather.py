"""Gathers the pages of each block into one run of bytes, and scatters them again, by PyTorch on the device.

If a block has many small pages, the overhead of one copy for each page is large. A gathered block needs one copy.

The memory of the KV cache is a table of equal rows here, and a page is one row or several rows of the table. PyTorch
then moves any number of pages in one kernel. A view with a dimension for the layers would span the whole cache, and
PyTorch would run one kernel for every 2 GiB of this span.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from undercroft.device.layout import GroupLayout

_ELEMENTS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Types of the elements that are moved, by size in bytes: the widest that fits. Their meaning does not matter."""
SMALLEST_ROW = 256
"""Bytes. A page smaller than this is one row. Larger pages are cut into rows of at least this size; if this is not
possible, they are not gathered."""


@dataclass(frozen=True, slots=True)
class Gather:
    """The pages of one KV cache group, to be gathered into shards."""

    table: torch.Tensor
    """Device memory as [row, element]."""
    first: np.ndarray
    """For each row of a shard, the number of its row in the table for block 0 (int64)."""
    step: np.ndarray
    """For each row of a shard, the rows of the table from one block to the next (int64)."""

    @classmethod
    def of(cls, layout: GroupLayout, tensors: Sequence[torch.Tensor]) -> Gather | None:
        """Gather the pages of ``layout``, which lie in the storages of ``tensors``.

        None if one table cannot hold all pages: they lie in several storages, or their distances have no large enough
        common divisor.
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
        """Number of table rows in one block."""
        return int(self.first.size)

    def rows(self, block_ids: np.ndarray) -> np.ndarray:
        """The row numbers of the blocks, block after block, for `gather` and `scatter`."""
        rows: np.ndarray = block_ids[:, None] * self.step + self.first
        return rows.reshape(-1)

    def gather(self, rows: torch.Tensor, shards: torch.Tensor) -> None:
        """Copy rows into ``shards``, uint8 [block, byte of the shard]. ``rows``: row numbers on the device."""
        torch.index_select(self.table, 0, rows, out=self._like_table(shards))

    def scatter(self, rows: torch.Tensor, shards: torch.Tensor) -> None:
        """Copy ``shards`` into rows. ``rows``: row numbers on the device, each at most once."""
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
