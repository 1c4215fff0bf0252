"""The names and behaviours of vLLM that differ between the versions supported (0.31 to 0.33).

Everything is found by looking for the feature, never by comparing version numbers. Imported by the connector only.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

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

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # 0.31: hits are not split by tier
    CacheHitSource = None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

__all__ = [
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "before_prefix_cache_reset",
    "block_sizes",
    "device_hit_tokens",
    "group_kind",
    "group_window",
    "hash_lookahead_tokens",
    "hash_seed",
    "hashes_adapters",
    "keeps_states",
    "layer_specs",
    "recompute_failed_loads",
    "reconcile_local_hits",
    "tell_adapters_apart",
    "vllm_release",
]

_KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MambaSpec": "state",
}
"""What a hit needs of each spec. By exact class: a subclass nobody looked at may need something else."""


def recompute_failed_loads(is_ours: Callable[[Any], bool]) -> None:
    """Make every scheduler whose connector ``is_ours`` recompute what failed to load.

    A connector can set vLLM's policy for itself in its constructor, but not as a child of MultiConnector, whose policy
    counts.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    if getattr(original, "_undercroft", False):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_ours(self.connector) and hasattr(self, "recompute_kv_load_failures"):
            self.recompute_kv_load_failures = True

    init._undercroft = True  # type: ignore[attr-defined]
    Scheduler.__init__ = init  # type: ignore[method-assign]


def vllm_release() -> str:
    """Major and minor version of vLLM, such as "0.32": pages may be laid out anew from one to the next."""
    from vllm import __version__

    return ".".join(__version__.split(".")[:2])


def block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Tokens per block hash, and the tokens of which every hit must be a multiple."""
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    if hash_tokens is None or alignment is None:
        alignment, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return hash_tokens, alignment


def device_hit_tokens(kv_cache_manager: KVCacheManager, request: Request) -> int:
    """Tokens of a request's prompt that the device's own prefix cache holds now. Counts as no use of them."""
    if not kv_cache_manager.enable_caching:
        return 0
    hit = kv_cache_manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    return hit[1]


def hash_seed(algorithm: str) -> str | None:
    """The seed of block hashes; None where each process draws its own.

    vLLM resolves it in the same way, but only after it has made the scheduler's connector.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if algorithm.startswith("xxhash"):
        return None
    return getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)


def hash_lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Tokens after a block that its hash covers too (some speculative decoders, 0.33)."""
    return getattr(vllm_config, "num_hash_lookahead_tokens", 0) or 0


def drops_last_block(vllm_config: VllmConfig) -> bool:
    """Whether hits leave out the last block, since a draft layer's KV there depends on the token after it.

    vLLM flags the draft's groups where it can tell which they are, and takes all for it where it cannot.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return bool(drops())


def layer_specs(spec: KVCacheSpec) -> Iterator[KVCacheSpec]:
    """The specs of a group's layers: one for all, or one for each (the workers' configuration)."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is None:
        yield spec
    else:
        yield from inner.values()


def group_kind(spec: KVCacheSpec) -> str | None:
    """The engine's word for what a hit needs of a group with this spec; None for a spec that is not known."""
    if not getattr(spec, "prefix_cacheable", True):
        return "ignored"
    kinds = {_KINDS.get(type(inner).__name__) for inner in layer_specs(spec)}
    return kinds.pop() if len(kinds) == 1 else None


def group_window(spec: KVCacheSpec) -> int:
    """Window or chunk of a group in tokens; 0 where there is none."""
    first = next(layer_specs(spec))
    if isinstance(first, kv_cache_interface.SlidingWindowSpec):
        # Blocks below the window that vLLM keeps all the same must be filled by a load, too.
        return first.sliding_window + getattr(first, "extra_retained_tokens", 0)
    if isinstance(first, kv_cache_interface.ChunkedLocalAttentionSpec):
        return first.attention_chunk_size
    return 0


def keeps_states(spec: KVCacheSpec) -> bool:
    """Whether a group of states keeps some of them at block boundaries, where a hit can end."""
    return all(inner.mamba_cache_mode == "align" for inner in layer_specs(spec))


def reconcile_local_hits(kv_cache_manager: KVCacheManager, usable: Callable[[Request, int], bool]) -> bool:
    """Ask ``usable(request, tokens)`` before vLLM takes full attention's local hit for one that we complete.

    vLLM asks for an external hit above that only, and where there is none it does not ask again for one above the
    boundary that all groups hold. False if this vLLM has no such hits.
    """
    original = getattr(kv_cache_manager, "get_computed_blocks_for_connector", None)
    if original is None:
        return False

    def get_computed_blocks_for_connector(request: Request, *limits: Any, **named_limits: Any) -> Any:
        # 0.33 says how long the hit may be.
        hit = original(request, *limits, **named_limits)
        *_, tokens, _, diverged = hit
        if diverged and not usable(request, tokens):
            return (*kv_cache_manager.get_computed_blocks(request, *limits, **named_limits), False)
        return hit

    kv_cache_manager.get_computed_blocks_for_connector = get_computed_blocks_for_connector  # type: ignore[method-assign]
    return True


def hashes_adapters() -> bool:
    """Whether block hashes have the part about LoRA adapters that `tell_adapters_apart` adds to."""
    return hasattr(kv_cache_utils, "_gen_lora_extra_hash_keys")


def tell_adapters_apart(of_request: Callable[[Request], str], before_loading: Callable[[Any], Any]) -> None:
    """Put ``of_request`` into the block hashes of requests with a LoRA adapter. Does nothing the second time.

    ``before_loading`` is told of adapters (`LoRARequest`) that are loaded before a request asks for them.
    """
    from vllm.v1.engine.core import EngineCore

    original = kv_cache_utils._gen_lora_extra_hash_keys
    if getattr(original, "_undercroft", False):
        return

    @functools.wraps(original)
    def keys(request: Request) -> list[Any]:
        found = original(request)
        return [*found, ("lora_weights", of_request(request))] if found else found

    keys._undercroft = True  # type: ignore[attr-defined]
    kv_cache_utils._gen_lora_extra_hash_keys = keys
    add_lora = EngineCore.add_lora

    @functools.wraps(add_lora)
    def add(self: Any, lora_request: Any) -> bool:
        before_loading(lora_request)
        return add_lora(self, lora_request)

    EngineCore.add_lora = add  # type: ignore[method-assign]


def before_prefix_cache_reset(block_pool: BlockPool, action: Callable[[], None]) -> None:
    """Run ``action`` each time before the pool resets its prefix cache.

    A reset is refused while anybody holds blocks, and vLLM asks the connector only afterwards: too late for a
    connector that could let go of its own.
    """
    reset: Callable[[], bool] = block_pool.reset_prefix_cache

    def reset_prefix_cache(*args: Any, **kwargs: Any) -> bool:
        action()
        return reset(*args, **kwargs)

    block_pool.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]
