"""The namespace of a tier: the description of the connector's namespace, and the format of vLLM's rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from undercroft.identity.namespace import Naming, describe

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from undercroft.vllm_tier.chunks import Chunks

ROWS = 1
"""Version of the reading of vLLM's rows. Raise it when another release of vLLM lays its rows out otherwise."""


def describe_tier(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, naming: Naming, offloading_config: Any, chunks: Chunks
) -> str:
    """The description as canonical JSON. Raises TypeError for a setting that cannot be described."""
    description = json.loads(describe(vllm_config, kv_cache_config, naming, chunks.shards))
    description["rows"] = {
        "version": ROWS,
        "layout": _layout(offloading_config),
        "kv_layout": offloading_config.kv_cache_layout,
        "row_bytes": chunks.chunk_bytes,
        "blocks_per_chunk": offloading_config.cache.blocks_per_chunk,
        "groups": [group.group_id for group in offloading_config.groups],
    }
    return json.dumps(description, sort_keys=True, separators=(",", ":"))


def _layout(offloading_config: Any) -> str:
    """How the ranks' bytes lie in a row: one rank after the other, one copy for all ranks, or canonically."""
    if offloading_config.canonical_layout:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

        return str(canonical_format_id(offloading_config.kv_cache_layout))
    return "ranks, one copy" if offloading_config.replicated_layout else "ranks"
