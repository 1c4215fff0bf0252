"""The options of this vLLM that have no effect, because this vLLM uses the engine of another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from undercroft.config import OPTIONS
from undercroft.engine import engine_options

if TYPE_CHECKING:
    from undercroft.config import UndercroftConfig

_MEMORY = ("host_memory", "promotion_memory", "pin_memory")


def ignored_options(config: UndercroftConfig, info: dict[str, Any], ranks: int = 1) -> list[str]:
    """Each option whose value differs from the engine's, with both values. ``info``: the engine's information.

    Sizes that are given as a percentage are not compared: their bytes depend on the memory and disk space at the start.
    """
    if config.server:
        # Beside the option `server` no option of the engine is allowed.
        return []
    theirs = info.get("options") or {}
    ours = engine_options(config, ranks=ranks)
    names = [option.name for option in OPTIONS if option.scope == "engine"] + ["disks"]
    return [
        f"{name} {_text(theirs[name])} instead of {_text(ours[name])}"
        for name in names
        if name in ours and name in theirs and ours[name] != theirs[name] and not _is_share(config, name)
    ]


def _is_share(config: UndercroftConfig, name: str) -> bool:
    return name in _MEMORY and getattr(config, name).size is None


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_text(one) for one in value) or "none"
    if isinstance(value, dict):
        capacity = value["capacity"]
        size = f"{capacity['share']:.0%}" if isinstance(capacity, dict) else f"{capacity} bytes"
        return f"{value['path']} ({size})"
    return str(value)
