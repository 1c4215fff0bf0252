"""KV caches with vLLM's layouts but without vLLM, for benchmarks and tests of the copiers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from undercroft.device.layout import WHOLE, DeviceLayout, Part, device_layout


class SyntheticCache(NamedTuple):
    """One KV cache group."""

    layout: DeviceLayout
    pages: tuple[torch.Tensor, ...]
    """For each layer, the bytes (int8) of its pages: [block, byte]."""
    config: Any
    """An object with the attributes of vLLM's ``KVCacheConfig``."""
    views: dict[str, torch.Tensor]
    """The caches that vLLM registers with a connector."""


def synthetic_cache(
    page_bytes: int,
    blocks: int,
    layers: int,
    layout: str,
    device: torch.device | str = "cpu",
    part: Part = WHOLE,
) -> SyntheticCache:
    """``layers`` layers with pages of ``page_bytes`` bytes in the KV cache layout ``layout``, all bytes zero."""
    names = [f"layers.{index}" for index in range(layers)]
    layers_outermost = layout.startswith("L")
    layer_stride = page_bytes * blocks if layers_outermost else page_bytes
    block_stride = page_bytes if layers_outermost else page_bytes * layers
    raw = torch.zeros(page_bytes * blocks * layers, dtype=torch.int8, device=device)
    config: Any = SimpleNamespace(
        num_blocks=blocks,
        kv_cache_layout=layout,
        kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=None)],
        kv_cache_tensors=[
            SimpleNamespace(layers=names, offset=0, layer_stride=layer_stride, block_stride=block_stride)
        ],
        prefix_cacheable_group_ids=(0,),
    )
    pages = [raw.as_strided((blocks, page_bytes), (block_stride, 1), index * layer_stride) for index in range(layers)]
    views = {name: page.view(blocks, 1, 1, page_bytes) for name, page in zip(names, pages, strict=True)}
    return SyntheticCache(device_layout(config, views, part), tuple(pages), config, views)
