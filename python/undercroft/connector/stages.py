"""The layers of all pipeline stages: one payload holds them, in the order in which a single stage has them.

The scheduler and each worker get the layers of one stage from vLLM, and those of the others from a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from undercroft import compat
from undercroft.device.layout import Part, copied_groups, group_shard_bytes, kv_replicas
from undercroft.vllm_patches import stages_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

ALL = slice(None)


def with_all_layers(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """The configuration with the layers of all stages in its groups; their places are those of its own stage."""
    stages = [stage.kv_cache_groups for stage in stages_of(kv_cache_config)]
    names = [[name for group in groups for name in group.layer_names] for groups in zip(*stages, strict=True)]
    groups = [
        replace(group, layer_names=layers) for group, layers in zip(kv_cache_config.kv_cache_groups, names, strict=True)
    ]
    return replace(kv_cache_config, kv_cache_groups=groups)


def shard_bytes(kv_cache_config: KVCacheConfig, stages: slice = ALL) -> tuple[int, ...]:
    """Per KV cache group, bytes of a block in the layers of these stages, of one rank in each."""
    chosen = stages_of(kv_cache_config)[stages]
    groups = range(len(kv_cache_config.kv_cache_groups))
    return tuple(sum(group_shard_bytes(stage, group) for stage in chosen) for group in groups)


def in_stage(part: Part, kv_cache_config: KVCacheConfig, stage: int) -> Part:
    """The part of a rank of this stage, which may be counted over all data-parallel ranks; ``part``: with one stage."""
    stages = len(stages_of(kv_cache_config))
    if stages == 1:
        return part
    earlier = slice(stage % stages)
    return part._replace(before=shard_bytes(kv_cache_config, earlier), whole=shard_bytes(kv_cache_config))


def why_stages_are_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """The reason, for people, why the stages' layers cannot be one payload; None if they can, or there is one stage."""
    count = vllm_config.parallel_config.pipeline_parallel_size
    if count == 1:
        return None
    what = f"pipeline_parallel_size = {count}"
    stages = stages_of(kv_cache_config)
    if len(stages) != count:
        return f"{what}: this vLLM does not show which layers each stage has (undercroft's plugin is needed)"
    if getattr(vllm_config, "speculative_config", None) is not None:
        return f"{what} with speculative decoding: the last stage alone has the draft's layers"
    if len({kv_replicas(stage) for stage in stages}) > 1:
        return f"{what}: ranks have the same KV in some stages only"
    return next(
        (f"{what}: {why}" for group in copied_groups(kv_cache_config) if (why := _why_not(stages, group))), None
    )


def _why_not(stages: Sequence[KVCacheConfig], group: int) -> str | None:
    specs: list[KVCacheSpec] = []
    pages = set()
    for number, stage in enumerate(stages):
        layers, spec = stage.kv_cache_groups[group].layer_names, stage.kv_cache_groups[group].kv_cache_spec
        if not layers:
            return f"stage {number} has no layer of KV cache group {group}"
        if sum(not set(tensor.layers).isdisjoint(layers) for tensor in stage.kv_cache_tensors) > 1:
            return f"KV cache group {group} has pages of several sizes"
        specs += compat.layer_specs(spec)
        pages.add(group_shard_bytes(stage, group) // len(layers))
    if len(pages) > 1 or any(spec != specs[0] for spec in specs):
        return f"the layers of KV cache group {group} ({type(specs[0]).__name__}) differ"
    return None
