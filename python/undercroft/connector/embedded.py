"""The engine inside the scheduler's process, and what it says of itself at start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from undercroft.sizing import resolve_sizes
from undercroft.units import format_size

if TYPE_CHECKING:
    from undercroft._core import Engine
    from undercroft.config import UndercroftConfig


def open_engine(config: UndercroftConfig) -> Engine:
    """Open the engine with this configuration. Raises ConfigError or a `_core.UndercroftError` with the way out."""
    from undercroft import _core

    sizes = resolve_sizes(config)
    wait = config.promotion_wait
    return _core.Engine(
        host_memory=sizes.host_memory,
        disks=sizes.disks,
        io_engine=config.io_engine,
        io_depth=config.io_depth,
        runtime_dir=config.socket_dir or None,
        promotion_memory=sizes.promotion_memory,
        promotion_wait_ms=None if wait.base_ms is None else (wait.base_ms, wait.per_1k_tokens_ms),
        min_load_tokens=max(1, config.min_load_tokens),
        eviction_policy=config.eviction_policy,
        disk_admission=config.disk_admission,
        disk_write_rate=config.disk_write_rate,
    )


def start_line(info: dict[str, Any], namespace: str) -> str:
    """One line on what was configured and found; ``info`` is that of `_core.Engine.info`."""
    host = f"host memory {format_size(info['host_memory'])}"
    if info.get("huge_pages"):
        host += " in huge pages"
    parts = [host]
    for disk in info.get("disks", ()):
        access = "O_DIRECT" if disk["o_direct"] else "buffered (no O_DIRECT here)"
        parts.append(
            f"disk {disk['path']} {format_size(disk['capacity'])}, {access}, "
            f"{disk['blocks_recovered']} blocks recovered"
        )
    if not info.get("disks"):
        parts.append("no disk tier")
    if info.get("io_engine"):
        parts.append(f"IO engine {info['io_engine']}")
    parts.append(f"namespace {namespace[:12]}")
    return "undercroft: " + "; ".join(parts)
