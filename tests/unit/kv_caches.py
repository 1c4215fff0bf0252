"""KV caches as vLLM allocates them: configuration by vLLM's own planner, tensors by its own allocator."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # vLLM before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

BLOCKS = 12


def full(heads: int = 2, head_size: int = 8, **fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=head_size, dtype=torch.bfloat16, **fields)


def sliding(window: int = 64) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=window)


def state(padded: int | None) -> MambaSpec:
    return MambaSpec(
        block_size=16,
        shapes=((3, 20), (2, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=padded,
    )


def group(name: str, layers: int, spec: KVCacheSpec) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([f"{name}.{i}" for i in range(layers)], spec)


def mixed_group(name: str, specs: list[KVCacheSpec]) -> KVCacheGroupSpec:
    """A group whose layers differ in page size, which vLLM places in one tensor for each spec."""
    layers = {f"{name}.{i}": spec for i, spec in enumerate(specs)}
    return KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers))


def plan(layout: str, groups: list[KVCacheGroupSpec], blocks: int = BLOCKS) -> KVCacheConfig:
    """The workers' configuration."""
    vllm_config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=blocks,
        ),
    )
    config = get_kv_cache_config_from_groups(vllm_config, copy.deepcopy(groups), 1 << 30)
    config.kv_cache_layout = layout
    return config


def scheduler_config(config: KVCacheConfig) -> KVCacheConfig:
    return generate_scheduler_kv_cache_config([config])


def allocate(
    config: KVCacheConfig, layout: str | None = None, kernel_block_sizes: list[int] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors, filled with random bytes."""
    name = layout or config.kv_cache_layout
    assert name is not None
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[name], kernel_block_sizes)
    fill(caches, seed=1)
    return caches


def storage(caches: dict[str, torch.Tensor]) -> np.ndarray:
    """The bytes of the backing allocation."""
    first = next(iter(caches.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(first).numpy()


def fill(caches: dict[str, torch.Tensor], seed: int) -> None:
    raw = storage(caches)
    raw[:] = np.random.default_rng(seed).integers(0, 256, raw.size, dtype=np.uint8)


def block_content(config: KVCacheConfig, caches: dict[str, torch.Tensor], group_id: int, block: int) -> list[bytes]:
    """Bytes of a block in each layer of a group as attention sees it: through vLLM's view, not by its address."""
    content = []
    for name in config.kv_cache_groups[group_id].layer_names:
        view = caches[name]
        per_block = view.shape[0] // config.num_blocks
        part = view[block * per_block : (block + 1) * per_block].contiguous()
        content.append(part.view(torch.uint8).numpy().tobytes())
    return content
