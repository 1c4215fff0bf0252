"""undercroft below the host memory of vLLM's own offloading (docs/vllm-tier.md): the module that vLLM imports by name.

vLLM copies between the device and its host memory. `UndercroftTier` brings that memory undercroft's disk, server and
remote store. The class is imported only where it is used, since the options are read without vLLM.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "UndercroftTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from undercroft.vllm_tier.tier import UndercroftTier

    return UndercroftTier
