"""The names and behaviours of vLLM that differ between the supported versions (0.31 to 0.33).

Features are detected, version numbers are never compared. Only the connector imports this module. The changes to
vLLM are in `undercroft.vllm_patches`.
"""

from __future__ import annotations

import bisect
import importlib
import os
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # 0.31: hits are not split by tier
    CacheHitSource = None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "block_removed",
    "block_sizes",
    "block_stored",
    "caps_external_hits",
    "device_hit_tokens",
    "event_hash",
    "event_hasher",
    "event_spec",
    "free_chunks",
    "group_kind",
    "group_window",
    "hash_lookahead_tokens",
    "hash_seed",
    "hashes_adapters",
    "host_tier",
    "hosts",
    "keeps_states",
    "layer_specs",
    "vllm_release",
]

MEDIUM_CPU, MEDIUM_STORAGE = "CPU", "STORAGE"

_KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MambaSpec": "state",
}
"""The blocks of a group that a hit needs, by the exact class of its spec: an unknown subclass may need others."""


def vllm_release() -> str:
    """Major and minor version of vLLM, such as "0.32"."""
    from vllm import __version__

    return ".".join(__version__.split(".")[:2])


def _known_fields(event: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    known = event.__struct_fields__
    return {name: value for name, value in fields.items() if name in known}


def block_stored(**fields: Any) -> BlockStored:
    """The event, without the fields that this vLLM does not have."""
    return BlockStored(**_known_fields(BlockStored, fields))


def block_removed(**fields: Any) -> BlockRemoved:
    """The event, without the fields that this vLLM does not have."""
    return BlockRemoved(**_known_fields(BlockRemoved, fields))


def event_hash(block_hash: bytes) -> Any:
    """A block hash in the form that events have."""
    return kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(block_hash))


def event_hasher() -> Callable[[bytes], Any]:
    """A faster `event_hash` that reads vLLM's environment only now, not for each block."""
    probe = bytes(range(32))
    if event_hash(probe) == probe:
        return lambda block_hash: block_hash
    if event_hash(probe) == int.from_bytes(probe[-8:], "big"):
        return lambda block_hash: int.from_bytes(block_hash[-8:], "big")
    return event_hash


def event_spec(spec: KVCacheSpec) -> tuple[str | None, int | None]:
    """The fields of events about a KV cache group: its kind and its window."""
    kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    window = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
    if kind is None or window is None:
        return None, None
    return kind(spec).value, window(spec)


def block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Tokens per block hash, and the tokens of which every hit must be a multiple."""
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    if hash_tokens is None or alignment is None:
        alignment, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return hash_tokens, alignment


def device_hit_tokens(kv_cache_manager: KVCacheManager, request: Request) -> int:
    """Tokens of a request's prompt in the device's own prefix cache now. Does not change their time of last use.

    With full attention alone this is a bisection: blocks are evicted from the end of a chain, and vLLM itself walks the
    whole prefix later. If a block in the middle was evicted all the same, the result may be too large.
    """
    if not kv_cache_manager.enable_caching:
        return 0
    coordinator, hashes = kv_cache_manager.coordinator, request.block_hashes
    most = request.num_tokens - 1
    [manager, *others] = coordinator.single_type_managers
    if others or type(manager) is not FullAttentionManager:
        return int(coordinator.find_longest_cache_hit(hashes, most)[1])
    pool, size = coordinator.block_pool, manager.block_size
    blocks = range(min(len(hashes), most // size))
    hit = bisect.bisect_left(blocks, True, key=lambda block: not pool.get_cached_block(hashes[block], [0]))
    # With drafts, vLLM computes the last block again.
    return int(max(0, hit - bool(manager.use_eagle)) * size)


def host_tier(offloading_connector: Any) -> Any:
    """The host memory of vLLM's offloading, as far as it is the one known here; None otherwise."""
    manager = getattr(getattr(offloading_connector, "connector_scheduler", None), "manager", None)
    primary = getattr(manager, "primary_tier", None)
    is_known = all(hasattr(primary, name) for name in ("lookup", "_get_num_free_chunks", "_num_evictable_cache_chunks"))
    return primary if is_known else None


def free_chunks(host: Any, kept: int) -> int:
    """Chunks for which a `host_tier` has room now, or could make some, but for ``kept`` chunks that must stay.

    Some of these may be in use, so that vLLM does not count them among those that it can evict.
    """
    return int(host._get_num_free_chunks()) + max(0, int(host._num_evictable_cache_chunks) - kept)


def provisional_tokens(kv_cache_manager: KVCacheManager) -> int:
    """Number of a request's last computed tokens that vLLM does not cache: draft layers may compute their KV again.

    Drafting with several modules (multi-module MTP) computes KV again. 0 in a vLLM without such drafting.
    """
    return int(getattr(getattr(kv_cache_manager, "coordinator", None), "num_reprefillable_tokens", 0))


def hash_seed(algorithm: str) -> str | None:
    """The seed of block hashes; None if each process draws its own seed.

    vLLM determines the seed by the same rule, but only after it has made the scheduler's connector.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if algorithm.startswith("xxhash"):
        return None
    return getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)


def hash_lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Number of tokens after a block that its hash also covers (some speculative decoders in 0.33)."""
    return getattr(vllm_config, "num_hash_lookahead_tokens", 0) or 0


def drops_last_block(vllm_config: VllmConfig) -> bool:
    """Whether hits leave out the last block, because a draft layer's KV there depends on the token after the block.

    vLLM flags the KV cache groups of the draft. If it cannot tell them from the others, it treats all groups so.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return bool(drops())


def layer_specs(spec: KVCacheSpec) -> Iterator[KVCacheSpec]:
    """The specs of a group's layers: one spec for all, or in the workers' configuration one for each layer."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is None:
        yield spec
    else:
        yield from inner.values()


def group_kind(spec: KVCacheSpec) -> str | None:
    """The blocks that a hit needs of a group with this spec, in the engine's words; None for an unknown spec."""
    if not getattr(spec, "prefix_cacheable", True):
        return "ignored"
    kinds = {_KINDS.get(type(inner).__name__) for inner in layer_specs(spec)}
    return kinds.pop() if len(kinds) == 1 else None


def group_window(spec: KVCacheSpec) -> int:
    """Tokens of a group's window or chunk; 0 if it has neither."""
    first = next(layer_specs(spec))
    if isinstance(first, kv_cache_interface.SlidingWindowSpec):
        # vLLM also keeps some blocks before the window. A load must fill these blocks as well.
        return int(first.sliding_window) + int(getattr(first, "extra_retained_tokens", 0))
    if isinstance(first, kv_cache_interface.ChunkedLocalAttentionSpec):
        return int(first.attention_chunk_size)
    return 0


def keeps_states(spec: KVCacheSpec) -> bool:
    """Whether a group of states keeps states at block boundaries, where a hit can end."""
    return all(inner.mamba_cache_mode == "align" for inner in layer_specs(spec))


def hashes_adapters() -> bool:
    """Whether block hashes have the part about LoRA adapters to which `vllm_patches.tell_adapters_apart` adds."""
    return hasattr(kv_cache_utils, "_gen_lora_extra_hash_keys")


def caps_external_hits() -> bool:
    """Whether vLLM shortens hits to the content of its store of routed experts. Before 0.33 a longer hit ends vLLM's
    engine."""
    try:
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    except ImportError:
        return False
    return hasattr(AuxOutputSchedulerConnector, "cap_external_hit")


def is_rocm() -> bool:
    """Whether vLLM runs on AMD GPUs: their device type has the name cuda, like that of NVIDIA GPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


def hosts(parallel_config: Any) -> int:
    """Number of machines with workers of one scheduler, as far as vLLM knows it when it makes the connectors."""
    spread = int(getattr(parallel_config, "nnodes_within_dp", getattr(parallel_config, "nnodes", 1)))
    group = getattr(parallel_config, "placement_group", None)
    if group is None:
        return spread
    try:
        ray: Any = importlib.import_module("ray")
        bundles = ray.util.placement_group_table(group)["bundles_to_node_id"]
        return max(spread, len(set(bundles.values())))
    except Exception:  # another version of Ray may raise any error: workers that cannot attach only never hit
        return spread


def may_trace() -> bool:
    """Whether vLLM can make spans of OpenTelemetry."""
    try:
        from vllm.tracing import extract_trace_context, instrument_manual, is_tracing_available
    except ImportError:
        return False
    return callable(extract_trace_context) and callable(instrument_manual) and bool(is_tracing_available())


def trace(span: str, since_s: float, headers: Any, attributes: dict[str, Any]) -> None:
    """Make a span from ``since_s`` (seconds since 1970) until now, beside vLLM's span of the request."""
    from vllm.tracing import extract_trace_context, instrument_manual

    instrument_manual(
        span, int(since_s * 1e9), time.time_ns(), attributes=attributes, context=extract_trace_context(headers)
    )
