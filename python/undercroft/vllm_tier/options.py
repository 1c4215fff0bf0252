"""The options of the tier: an entry of ``secondary_tiers`` in vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undercroft.config import UndercroftConfig
from undercroft.embed import EMBED_OPTIONS
from undercroft.embed.memory import with_small_memory
from undercroft.errors import ConfigError

CONNECTOR = "OffloadingConnector"
"""vLLM's connector that has tiers."""
TIER = "UndercroftTier"
MODULE = "undercroft.vllm_tier"
_VLLMS = ("type", "module_path", "backpressure")
"""Keys of an entry that are vLLM's own."""
_OWN = (
    "unique_media_uuids",
    "promotion_wait",
    "early_prefetch",
    "namespace_salt",
    "reset_with_prefix_cache",
    "weights",
    "model_id",
)
_ALLOWED = [name for name in (*EMBED_OPTIONS, *_OWN) if name != "pin_memory"]
_CONNECTOR_ONLY = "it needs undercroft's own connector (docs/vllm-tier.md)"
_REFUSED = {
    "save": "vLLM's option offload_prompt_only decides this",
    "state_interval_tokens": "vLLM's option prefix_cache_retention_interval decides this",
    "lookup": "vLLM's offloading never waits in the scheduler",
    "lookup_timeout_ms": "vLLM's offloading never waits in the scheduler",
    "pin_memory": _CONNECTOR_ONLY,
    "client_fields": _CONNECTOR_ONLY,
    "cache_hit_threshold": _CONNECTOR_ONLY,
    "cache_hit_threshold_answer": _CONNECTOR_ONLY,
    "gather_below": "vLLM copies between the device and its host memory",
    "kv_layout": "vLLM's option canonical_layout decides this",
    "share_weight_versions": _CONNECTOR_ONLY,
    "log_requests": _CONNECTOR_ONLY,
    "record": _CONNECTOR_ONLY,
    "shadow": _CONNECTOR_ONLY,
}


def parse(tier: Mapping[str, Any], row_bytes: int = 0) -> UndercroftConfig:
    """The options of an entry of ``secondary_tiers``. ``row_bytes``: size of a chunk, if it is known. Raises
    ConfigError."""
    given = {key: value for key, value in tier.items() if key not in _VLLMS}
    config = UndercroftConfig.parse(given, place="secondary_tiers", allowed=_ALLOWED, refused=_REFUSED)
    return with_small_memory(config, given, row_bytes)


def check(kv_connector: str, extra_config: Any) -> list[UndercroftConfig]:
    """The options of each entry for undercroft among the ``secondary_tiers`` of an offloading connector. Raises
    ConfigError."""
    entries = extra_config.get("secondary_tiers") if isinstance(extra_config, Mapping) else None
    tiers = [one for one in entries if isinstance(one, Mapping) and one.get("module_path") == MODULE] if entries else []
    if kv_connector != CONNECTOR or not tiers:
        return []
    for tier in tiers:
        if tier.get("type") != TIER:
            raise ConfigError(
                f'undercroft: type = {tier.get("type")!r} in secondary_tiers. With {MODULE} it is "{TIER}".'
            )
    spec = extra_config.get("spec_name")
    if spec in (None, "CPUOffloadingSpec"):
        raise ConfigError(
            f"undercroft: spec_name = {spec!r} has no secondary_tiers, so vLLM would never use undercroft. Set it to "
            '"TieringOffloadingSpec".'
        )
    return [parse(tier) for tier in tiers]
