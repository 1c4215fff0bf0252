"""How the ranks of tensor parallelism divide a payload, and whether the payload depends on their number.

A payload that does not depend on it is the one that a single rank with all heads would save. Each rank then has the
runs of its own heads in it, so that engines with any number of ranks share a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from undercroft import compat
from undercroft.device.api import GATHER_BELOW
from undercroft.device.layout import Part, kv_replicas

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_BY_HEADS_LAYOUT = "LBHNC"
"""The layout in which a rank has as few runs in the payload as on its device."""
_BY_HEADS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""Specs whose pages have one head after the other in this layout."""
_BY_HEADS_MODES = ("NONE", "FP8_PER_TENSOR")
"""Quantizations without scales among the values."""


class Division(NamedTuple):
    """How the ranks divide each payload."""

    shards: int
    """Number of ranks with different KV."""
    replicas: int
    """Number of neighbouring ranks with the same KV, which share a shard."""
    reason: str | None = None
    """The reason, for people, why the payload depends on the number of ranks; None if it does not."""

    @property
    def common_shards(self) -> int:
        """The number of shards for `undercroft.identity.namespace.describe`; 0 if payloads depend on it."""
        return 0 if self.reason else self.shards

    def part(self, rank: int) -> Part:
        """The part of the rank with this number among the ranks of tensor parallelism."""
        return Part(rank // self.replicas, self.shards, self.reason is None)


def division(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Division:
    """The division, from the configuration alone: the scheduler and every worker find the same one."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    replicas = kv_replicas(kv_cache_config)
    if replicas == ranks:
        return Division(1, ranks)
    if reason := _why_not_by_heads(vllm_config, kv_cache_config):
        return Division(ranks // replicas, replicas, reason)
    # vLLM reports replicas for latent attention only, not for heads of which several ranks have the same.
    heads = vllm_config.model_config.get_total_num_kv_heads()
    shards = min(ranks, heads)
    return Division(shards, ranks // shards)


def _are_all(hf_config: Any, heads: int) -> bool:
    """Whether each number of heads of keys and values in a model's configuration is this one."""
    values = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    named = [value for name, value in values.items() if "kv_head" in name or "key_value_head" in name]
    numbers = [number for value in named for number in (value if isinstance(value, list) else [value])]
    return all(number in (heads, None) for number in numbers)


def divides_by_heads(spec: Any, heads: int, ranks: int) -> bool:
    """Whether the ranks have the pages that a division of the model's heads of KV gives them."""
    is_split = type(spec).__name__ in _BY_HEADS and spec.num_head_slots is None
    is_even = heads % ranks == 0 or ranks % heads == 0
    return is_split and is_even and spec.num_kv_heads == max(1, heads // ranks)


def _is_on_gpu(vllm_config: VllmConfig) -> bool:
    return str(getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu")) == "cuda"


def _why_not_by_heads(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    if kv_cache_config.kv_cache_layout != _BY_HEADS_LAYOUT:
        # Heads inside of tokens would be a copy for each token, and layers inside of blocks one for each layer where
        # the block is one copy.
        return (
            f"in the KV cache layout {kv_cache_config.kv_cache_layout} a payload for any number of ranks would be many "
            f"short copies (VLLM_KV_CACHE_LAYOUT={_BY_HEADS_LAYOUT} has few, where the attention backend supports it)"
        )
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft is not getattr(speculative, "target_model_config", None):
        return "the KV of a draft model may be divided otherwise"
    heads = vllm_config.model_config.get_total_num_kv_heads()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks > heads and not _are_all(vllm_config.model_config.hf_text_config, heads):
        # A layer with more heads than the others would look as if ranks had the same.
        return "layers differ in their number of heads of keys and values"
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec in compat.layer_specs(group.kv_cache_spec):
            what = f"KV cache group {index} ({type(spec).__name__})"
            if not divides_by_heads(spec, heads, ranks):
                return f"{what} is not divided by the model's {heads} heads of keys and values"
            if getattr(spec.kv_quant_mode, "name", "NONE") not in _BY_HEADS_MODES:
                return f"{what} has scales among its values ({spec.kv_quant_mode.name})"
            if _is_on_gpu(vllm_config) and spec.page_size_bytes < GATHER_BELOW:
                # Gathered, a block is one copy. The parts of a rank are no neighbours in a payload by heads, and a GPU
                # copies such pages one by one at less than half of the bus's speed, in the way of the model's launches.
                return f"{what} has pages of {spec.page_size_bytes} bytes on each rank, too small for single copies"
        if sum(not set(tensor.layers).isdisjoint(group.layer_names) for tensor in kv_cache_config.kv_cache_tensors) > 1:
            return f"KV cache group {index} has pages of several sizes"
    return None
