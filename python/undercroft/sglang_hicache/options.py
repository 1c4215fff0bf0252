"""The options of the back end: SGLang's ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undercroft.config import UndercroftConfig
from undercroft.embed import EMBED_DEFAULTS, EMBED_OPTIONS
from undercroft.errors import ConfigError

PLACE = "--hicache-storage-backend-extra-config"
_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1", "hicache_storage_pass_prefix_keys")
"""Keys that are SGLang's own. It removes others of its own before it makes a back end."""
_ALLOWED = [name for name in (*EMBED_OPTIONS, "namespace_salt", "weights", "model_id") if name != "pin_memory"]
_ENGINES = "it needs vLLM"
_REFUSED = {
    "pin_memory": "the copies begin and end in SGLang's pools, which SGLang pins",
    "promotion_wait": "SGLang's --hicache-storage-prefetch-policy decides this",
    "early_prefetch": "SGLang prefetches by itself",
    "lookup": "SGLang waits on threads of its own",
    "cache_hit_threshold": _ENGINES,
    "cache_hit_threshold_answer": _ENGINES,
    "client_fields": _ENGINES,
    "save": "SGLang's --hicache-write-policy decides this",
    "gather_below": "SGLang copies between the device and its pools",
    "kv_layout": "SGLang's --hicache-mem-layout decides this",
    "unique_media_uuids": "SGLang's --trust-mm-content-hashes decides this",
}


def parse(extra_config: Mapping[str, Any] | None) -> UndercroftConfig:
    """The options of the back end. Raises ConfigError."""
    given = dict(extra_config or {})
    if not given.get("interface_v1"):
        raise ConfigError(
            f"undercroft: interface_v1 = {given.get('interface_v1')!r} in {PLACE}. Set it to 1: with SGLang's other "
            "interface, pages come without their prefixes, and undercroft could not keep them."
        )
    own = {key: value for key, value in given.items() if key not in _SGLANGS}
    return UndercroftConfig.parse(own, place=PLACE, allowed=_ALLOWED, refused=_REFUSED, defaults=EMBED_DEFAULTS)
