"""Pages scattered over device memory into one run of bytes for each block, and back, by PyTorch on the device.

Where a block is many small pages, one copy for each page would be all overhead. Gathered, a block is one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from undercroft.device.layout import GroupLayout

_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes are moved in the widest integers that fit; their meaning does not matter here."""


class _Section(NamedTuple):
    """Runs of equal size that lie at equal distances, as a tensor [block, run, element]."""

    pages: torch.Tensor
    begin: int
    """First element of the shard that they make up."""
    end: int


@dataclass(frozen=True, slots=True)
class Gather:
    """The pages of one KV cache group, to be gathered into shards."""

    sections: tuple[_Section, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, layout: GroupLayout, tensors: Sequence[torch.Tensor]) -> Gather:
        """For the pages of ``layout``, which lie in the storages of ``tensors``. Raises ValueError if they do not."""
        arrays = (layout.addresses, layout.strides, layout.sizes, layout.shard_offsets)
        common = math.gcd(8, *(int(value) for array in arrays for value in array))
        dtype = _ELEMENTS[common]
        sections = []
        for begin, end in _alike(layout):
            shape = (layout.num_blocks, end - begin, int(layout.sizes[begin]) // common)
            step = int(layout.addresses[begin + 1] - layout.addresses[begin]) if end - begin > 1 else common
            strides = (int(layout.strides[begin]) // common, step // common, 1)
            pages = _view(tensors, int(layout.addresses[begin]), dtype, shape, strides)
            first = int(layout.shard_offsets[begin]) // common
            sections.append(_Section(pages, first, first + shape[1] * shape[2]))
        return cls(tuple(sections), dtype)

    def gather(self, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the pages of the blocks (int64, on the device) into ``rows``, uint8 [block, byte of the shard]."""
        for pages, section in self._sections(rows):
            torch.index_select(pages, 0, block_ids, out=section)

    def scatter(self, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy ``rows`` into the pages of the blocks, each of which may occur once."""
        for pages, section in self._sections(rows):
            pages.index_copy_(0, block_ids, section)

    def _sections(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        elements = rows.view(self.dtype)
        return [
            (section.pages, elements[:, section.begin : section.end].view(len(elements), *section.pages.shape[1:]))
            for section in self.sections
        ]


def _alike(layout: GroupLayout) -> list[tuple[int, int]]:
    """Ranges of runs that have one size, one stride, and one distance to the next."""
    ranges = []
    begin = 0
    count = layout.sizes.size
    steps = np.diff(layout.addresses)
    for index in range(1, count + 1):
        joins = (
            index < count
            and layout.sizes[index] == layout.sizes[begin]
            and layout.strides[index] == layout.strides[begin]
            and steps[index - 1] == steps[begin]
            and steps[begin] > 0
        )
        if not joins:
            ranges.append((begin, index))
            begin = index
    return ranges


def _view(
    tensors: Sequence[torch.Tensor],
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        offset = address - storage.data_ptr()
        if 0 <= offset < storage.nbytes():
            empty = torch.empty(0, dtype=dtype, device=tensor.device)
            return empty.set_(storage, offset // dtype.itemsize, shape, strides)
    raise ValueError(f"no tensor of the KV cache holds address {address:#x}")
