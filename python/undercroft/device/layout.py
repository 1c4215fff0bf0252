"""The places of the KV cache's pages in device memory, and in the payload of a block.

vLLM places every layer in one backing allocation: block ``b`` of the ``l``-th layer of a ``KVCacheTensor`` begins at
``offset + l * layer_stride + b * block_stride``. A shard is one rank's part of a payload: the page of each layer of
the group, in the group's layer order. Its size follows from the specs alone, so that the scheduler, which has no
tensors, and every worker compute the same size. The worker checks the specs against the tensors.

A payload divided by heads has the pages of a single rank that has all heads, in the same order and without gaps. Any
other payload has the shards side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVCacheTensor

    from undercroft._core import BlockPages

SUPPORTED_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Layouts in which each page (one layer of one block) is one run of bytes."""

NULL_BLOCK = 0
"""The device block that stands for "no block" in vLLM's block tables. No request's KV is ever in it."""


class LayoutError(ValueError):
    """The KV cache has a layout that cannot be copied, or a layout that differs from its configuration."""


class Part(NamedTuple):
    """One rank's part of each payload."""

    shard: int = 0
    """The rank's number among the ranks with different KV."""
    shards: int = 1
    """Number of ranks with different KV."""
    by_heads: bool = True
    """Whether each page of the payload has the heads of all ranks. Otherwise the shards lie side by side."""
    before: tuple[int, ...] = ()
    """Per KV cache group, bytes of a shard in the layers of earlier pipeline stages; empty if there is one stage."""
    whole: tuple[int, ...] = ()
    """Per KV cache group, bytes of a shard in the layers of all stages; empty if there is one stage."""

    def begin(self, group: int, own: int) -> int:
        """Offset in a payload of the first layer of this rank's stage; ``own``: bytes of its part."""
        before = self.before[group] if self.before else 0
        if self.by_heads:
            return before * self.shards
        return self.shard * (self.whole[group] if self.whole else own) + before


WHOLE = Part()
"""The part of the only rank."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The pages of one KV cache group on this rank, as runs of bytes: the layers' pages, or pieces of them. Runs that
    are neighbours on the device and in the payload are one."""

    group: int
    num_blocks: int
    addresses: np.ndarray
    """Address of each run in block 0 (int64)."""
    strides: np.ndarray
    """Bytes from a run in one block to the same run in the next (int64)."""
    sizes: np.ndarray
    """Bytes of each run (int64)."""
    offsets: np.ndarray
    """Offset of each run in the payload (int64), ascending."""
    shard_bytes: int
    """Bytes of all runs."""
    begin: int = field(init=False)
    """Where this rank's part of a payload begins, from the payload's start."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "begin", int(self.offsets[0]) if self.offsets.size else 0)

    def pages(self) -> BlockPages:
        """The runs, for the core: as bytes from the begin of this rank's part on."""
        from undercroft._core import BlockPages

        return BlockPages(self.addresses, self.strides, self.sizes, self.offsets - self.begin)

    @property
    def span(self) -> int:
        """Bytes from the begin to the end of this rank's part; more than `shard_bytes` if other ranks have some."""
        return int(self.offsets[-1] + self.sizes[-1]) - self.begin if self.offsets.size else 0


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """All groups of the KV cache that can be copied, by the group's index."""

    device: torch.device
    groups: dict[int, GroupLayout]
    tensors: tuple[torch.Tensor, ...] = ()
    """The tensors at the addresses: these references keep their memory allocated."""

    def group(self, index: int) -> GroupLayout:
        """A group. Raises ValueError if it cannot be copied."""
        if index not in self.groups:
            raise ValueError(f"KV cache group {index} cannot be copied; groups {sorted(self.groups)} can")
        return self.groups[index]


@dataclass(slots=True)
class GroupCopy:
    """Blocks of one KV cache group to copy between the device and the arena.

    ``block_ids[i]`` (int64) is the device block, ``offsets[i]`` (int64) the offset in bytes of its payload from the
    start of the arena. Each rank copies its `Part` of the payload.
    """

    group: int
    block_ids: np.ndarray
    offsets: np.ndarray

    def turn(self, replica: int, replicas: int) -> GroupCopy:
        """The blocks that the ``replica``-th of ``replicas`` ranks with the same KV saves for all of them."""
        mine = np.asarray(self.block_ids) % replicas == replica
        return GroupCopy(self.group, self.block_ids[mine], self.offsets[mine])


def unsupported_reason(config: KVCacheConfig) -> str | None:
    """The reason why the KV cache cannot be copied, or None. Scheduler and workers get the same answer."""
    layout = config.kv_cache_layout
    if layout is not None and layout not in SUPPORTED_LAYOUTS:
        return (
            f"KV cache layout {layout} splits a page into one piece per head; "
            f"set VLLM_KV_CACHE_LAYOUT to one of {', '.join(SUPPORTED_LAYOUTS)}"
        )
    if any(getattr(group, "host_resident", False) for group in config.kv_cache_groups):
        return "a KV cache group lies in host memory (HiSparse), which is not supported"
    return None


def copied_groups(config: KVCacheConfig) -> tuple[int, ...]:
    """Indexes of the groups whose blocks a hash finds again."""
    return tuple(config.prefix_cacheable_group_ids)


def kv_replicas(config: KVCacheConfig) -> int:
    """Number of neighbouring tensor-parallel ranks with the same KV in every layer, as vLLM reports it; 1 if none."""
    return getattr(config, "kv_tp_replicas", 1)


def group_shard_bytes(config: KVCacheConfig, group: int) -> int:
    """Bytes of one block of ``group`` on one rank, from the configuration alone.

    Raises LayoutError if a layer of the group has no place in the KV cache.
    """
    return sum(_page_bytes(config, group))


def device_layout(config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], part: Part = WHOLE) -> DeviceLayout:
    """Find the pages of ``kv_caches``, the tensors that vLLM registers, one for each layer, on a rank with ``part``.

    Raises LayoutError if the layout is not supported, or the tensors' places differ from ``config``.
    """
    reason = unsupported_reason(config)
    if reason is not None:
        raise LayoutError(reason)
    devices = {tensor.device for tensor in kv_caches.values()}
    if len(devices) != 1:
        raise LayoutError(f"expected the KV cache on one device, found {sorted(map(str, devices))}")
    groups = {group: _group_layout(config, group, kv_caches, part) for group in copied_groups(config)}
    return DeviceLayout(devices.pop(), groups, tuple(kv_caches.values()))


def check_blocks(layout: GroupLayout, block_ids: np.ndarray, slots: np.ndarray) -> None:
    """Raise ValueError if a block cannot hold a request's KV, or if the arrays differ in length."""
    if block_ids.ndim != 1 or block_ids.shape != slots.shape:
        raise ValueError(
            f"group {layout.group}: {block_ids.shape} block ids for {slots.shape} slots; both must be as long"
        )
    if block_ids.size and (block_ids.min() <= NULL_BLOCK or block_ids.max() >= layout.num_blocks):
        outside = (block_ids <= NULL_BLOCK) | (block_ids >= layout.num_blocks)
        raise ValueError(
            f"group {layout.group}: device block {int(block_ids[outside][0])} cannot be copied; "
            f"blocks {NULL_BLOCK + 1} to {layout.num_blocks - 1} can"
        )


def _group_layout(config: KVCacheConfig, group: int, kv_caches: Mapping[str, torch.Tensor], part: Part) -> GroupLayout:
    pages = _page_bytes(config, group)
    runs: list[list[int]] = []
    begin = part.begin(group, sum(pages))
    for name, page in zip(config.kv_cache_groups[group].layer_names, pages, strict=True):
        tensor, index = _placement(config, name)
        address = _checked_address(config, name, tensor, index, page, kv_caches)
        is_split = part.by_heads and part.shards > 1
        count = _pieces(config, name, page, kv_caches[name]) if is_split else 1
        size = page // count
        for piece in range(count):
            # A page of the payload has so many pieces too, each with the heads of all ranks, one after the other.
            offset = begin + (piece * part.shards + part.shard) * size if is_split else begin
            _append(runs, address + piece * size, tensor.block_stride, size, offset)
        begin += page * part.shards if is_split else page
    addresses, strides, sizes, offsets = np.array(runs, dtype=np.int64).reshape(-1, 4).T.copy()
    return GroupLayout(group, config.num_blocks, addresses, strides, sizes, offsets, sum(pages))


def _append(runs: list[list[int]], address: int, stride: int, size: int, offset: int) -> None:
    """Append a run, or lengthen the last one if this one goes on with it on both sides."""
    if runs:
        last_address, last_stride, last_size, last_offset = runs[-1]
        if (last_address + last_size, last_stride, last_offset + last_size) == (address, stride, offset):
            runs[-1][2] += size
            return
    runs.append([address, stride, size, offset])


def _pieces(config: KVCacheConfig, name: str, page: int, view: torch.Tensor) -> int:
    """Number of runs of a page that each have one or more tokens of all of the rank's heads."""
    kernel_blocks: int = view.shape[0] // config.num_blocks
    if view.ndim != 4 or view[:kernel_blocks].numel() * view.element_size() != page:
        raise LayoutError(f"layer {name}: a page of shape {tuple(view.shape[1:])} is not one of heads and tokens")
    tokens: int = 1 if str(config.kv_cache_layout).endswith("HNC") else view.shape[2]
    return kernel_blocks * tokens


def _placement(config: KVCacheConfig, layer: str) -> tuple[KVCacheTensor, int]:
    for tensor in config.kv_cache_tensors:
        if layer in tensor.layers:
            return tensor, tensor.layers.index(layer)
    raise LayoutError(f"layer {layer} has no place in the KV cache")


def _page_bytes(config: KVCacheConfig, group: int) -> list[int]:
    """Bytes to copy of each layer's page, in the group's layer order.

    The padding at a page's end holds nothing and is left out if the spec of the layer is known. The spec is unknown if
    a group mixes specs, and so has several tensors: the scheduler's configuration keeps only the first spec.
    """
    names = config.kv_cache_groups[group].layer_names
    placements = [_placement(config, name)[0] for name in names]
    # A page ends where the next block begins, or, if blocks are the outermost dimension, where the next layer begins.
    padded = [min(tensor.layer_stride, tensor.block_stride) for tensor in placements]
    if len({id(tensor) for tensor in placements}) > 1:
        return padded
    content = _content_bytes(config.kv_cache_groups[group].kv_cache_spec)
    if content is None:
        return padded
    if padded and content > min(padded):
        raise LayoutError(f"KV cache group {group}: pages of {content} bytes lie only {min(padded)} bytes apart")
    return [content] * len(names)


def _content_bytes(spec: KVCacheSpec) -> int | None:
    """Bytes of a page without padding; None if the kind of spec does not have this number."""
    layers = getattr(spec, "kv_cache_specs", None)
    first = next(iter(layers.values())) if layers else spec
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        content = getattr(first, name, None)
        if content is not None:
            return int(content)
    return None


def _checked_address(
    config: KVCacheConfig,
    name: str,
    tensor: KVCacheTensor,
    index: int,
    page: int,
    kv_caches: Mapping[str, torch.Tensor],
) -> int:
    """Address of the layer's page in block 0, after a comparison of vLLM's configuration with the registered tensor."""
    view = kv_caches.get(name)
    if view is None:
        raise LayoutError(f"layer {name} is in the KV cache configuration, but was not registered")
    storage = view.untyped_storage()
    start = tensor.offset + index * tensor.layer_stride
    address: int = storage.data_ptr() + start
    if view.data_ptr() != address:
        raise LayoutError(
            f"layer {name} begins at byte {view.data_ptr() - storage.data_ptr()} of its storage, not at {start}"
        )
    end = start + (config.num_blocks - 1) * tensor.block_stride + page
    if start < 0 or end > storage.nbytes():
        raise LayoutError(f"layer {name} reaches to byte {end} of a storage of {storage.nbytes()} bytes")
    _check_page(config, name, tensor, page, view)
    return address


def _check_page(config: KVCacheConfig, name: str, tensor: KVCacheTensor, page: int, view: torch.Tensor) -> None:
    """Raise LayoutError unless the view's dimensions inside one block are one run of bytes that ``page`` covers."""
    if view.ndim == 0 or view.shape[0] % config.num_blocks:
        raise LayoutError(f"layer {name} has shape {tuple(view.shape)}, which is not {config.num_blocks} blocks")
    kernel_blocks = view.shape[0] // config.num_blocks
    stride = view.stride(0) * view.element_size() * kernel_blocks
    if config.num_blocks > 1 and stride != tensor.block_stride:
        raise LayoutError(f"layer {name} has blocks {stride} bytes apart, not {tensor.block_stride}")
    inner = [(kernel_blocks, view.stride(0)), *zip(view.shape[1:], view.stride()[1:], strict=True)]
    run = 1
    for size, step in sorted(((size, step) for size, step in inner if size > 1), key=lambda pair: pair[1]):
        if step != run:
            raise LayoutError(f"layer {name}: the page of a block is not one run of bytes (strides {view.stride()})")
        run *= size
    if run * view.element_size() > page:
        raise LayoutError(f"layer {name}: a page has {run * view.element_size()} bytes, but its spec says {page}")
