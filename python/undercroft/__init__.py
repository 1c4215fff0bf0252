"""A tiered KV cache for vLLM: host memory, then local NVMe, under the device's own prefix cache.

vLLM loads it as the KV connector ``UndercroftConnector``; `undercroft.config` lists the options. Nothing of vLLM, torch
or the compiled core is imported here, so that the command line and vLLM's frontend start quickly.
"""

from __future__ import annotations

from undercroft.config import UndercroftConfig
from undercroft.errors import ConfigError

__all__ = ["ConfigError", "UndercroftConfig", "__version__"]


def __getattr__(name: str) -> str:
    """``__version__``, which is looked up at its first use."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    return metadata.version("undercroft")
