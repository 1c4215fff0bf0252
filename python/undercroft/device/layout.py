"""The places of the KV cache's pages in device memory, and the shard that one block's pages make up.

vLLM places every layer in one backing allocation: block ``b`` of the ``l``-th layer of a ``KVCacheTensor`` begins at
``offset + l * layer_stride + b * block_stride``. A shard is one rank's part of a payload: the page of each layer of
the group, in the group's layer order, without gaps. Its size follows from the specs alone, so that the scheduler,
which has no tensors, and every worker compute the same size. The worker checks the specs against the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The pages of one KV cache group on this rank, as runs of bytes: the layers' pages, adjacent ones merged."""

    group: int
    num_blocks: int
    addresses: np.ndarray
    """Address of each run in block 0 (int64)."""
    strides: np.ndarray
    """Bytes from a run in one block to the same run in the next (int64)."""
    sizes: np.ndarray
    """Bytes of each run (int64)."""
    shard_offsets: np.ndarray
    """Offset of each run in the shard (int64)."""
    shard_bytes: int

    def pages(self) -> BlockPages:
        """The runs, for the core."""
        from undercroft._core import BlockPages

        return BlockPages(self.addresses, self.strides, self.sizes, self.shard_offsets)


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
    start of the arena. A payload holds all shards side by side: shard s begins at ``offset + s * shard_bytes``. Each
    rank has a shard of its own, except that ranks with the same KV (`kv_replicas`) share one shard.
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


def device_layout(config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> DeviceLayout:
    """Find the pages of ``kv_caches``, the tensors that vLLM registers, one for each layer.

    Raises LayoutError if the layout is not supported, or the tensors' places differ from ``config``.
    """
    reason = unsupported_reason(config)
    if reason is not None:
        raise LayoutError(reason)
    devices = {tensor.device for tensor in kv_caches.values()}
    if len(devices) != 1:
        raise LayoutError(f"expected the KV cache on one device, found {sorted(map(str, devices))}")
    groups = {group: _group_layout(config, group, kv_caches) for group in copied_groups(config)}
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


def _group_layout(config: KVCacheConfig, group: int, kv_caches: Mapping[str, torch.Tensor]) -> GroupLayout:
    pages = _page_bytes(config, group)
    addresses: list[int] = []
    strides: list[int] = []
    sizes: list[int] = []
    for name, page in zip(config.kv_cache_groups[group].layer_names, pages, strict=True):
        tensor, index = _placement(config, name)
        address = _checked_address(config, name, tensor, index, page, kv_caches)
        if addresses and address == addresses[-1] + sizes[-1] and tensor.block_stride == strides[-1]:
            sizes[-1] += page
        else:
            addresses.append(address)
            strides.append(tensor.block_stride)
            sizes.append(page)
    run_sizes = np.array(sizes, dtype=np.int64)
    return GroupLayout(
        group=group,
        num_blocks=config.num_blocks,
        addresses=np.array(addresses, dtype=np.int64),
        strides=np.array(strides, dtype=np.int64),
        sizes=run_sizes,
        shard_offsets=np.cumsum(run_sizes) - run_sizes,
        shard_bytes=sum(sizes),
    )


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
