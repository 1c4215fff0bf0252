"""The engine that a scheduler uses, and what is said of it at start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from undercroft.sizing import resolve_sizes
from undercroft.units import format_size

if TYPE_CHECKING:
    from undercroft._core import Client, Engine
    from undercroft.config import UndercroftConfig


def open_engine(config: UndercroftConfig) -> Engine | Client:
    """The server's engine if one is configured, else one in this process, or that of the owner of the directories.

    Raises ConfigError or a `_core.UndercroftError` with the way out.
    """
    from undercroft import _core

    if config.server:
        return _core.Client(
            config.server.removeprefix("unix://"),
            server_timeout_ms=config.server_timeout_ms,
            lookup_spin_us=config.lookup_spin_us,
        )
    sizes = resolve_sizes(config)
    return _core.Engine(
        host_memory=sizes.host_memory,
        disks=sizes.disks,
        io_engine=config.io_engine,
        io_depth=config.io_depth,
        runtime_dir=config.socket_dir or None,
        promotion_memory=sizes.promotion_memory,
        min_load_tokens=max(1, config.min_load_tokens),
        eviction_policy=config.eviction_policy,
        disk_admission=config.disk_admission,
        disk_write_rate=config.disk_write_rate,
        share=True,
        server_timeout_ms=config.server_timeout_ms,
        lookup_spin_us=config.lookup_spin_us,
    )


def start_line(info: dict[str, Any], namespace: str, where: str = "") -> str:
    """One line on what was configured and found; ``info`` is that of `_core.Engine.info`.

    ``where``: whose engine it is, if it is not this process's.
    """
    if not info:
        return f"undercroft: {where} is not there yet; serving without it until it is; namespace {namespace[:12]}"
    host = f"host memory {format_size(info['host_memory'])}"
    if info.get("huge_pages"):
        host += " in huge pages"
    parts = [where, host] if where else [host]
    for disk in info.get("disks", ()):
        access = "O_DIRECT" if disk["o_direct"] else "buffered (no O_DIRECT here)"
        parts.append(
            f"disk {disk['path']} {format_size(disk['capacity'])}, {access}, "
            f"{disk['blocks_recovered']} blocks recovered"
        )
    if not info.get("disks"):
        parts.append("no disk tier")
    if info.get("io_engine"):
        parts.append(f"IO engine {info['io_engine']}{_shortfall(info)}")
    parts.append(f"namespace {namespace[:12]}")
    return "undercroft: " + "; ".join(parts)


def _shortfall(info: dict[str, Any]) -> str:
    """Why the disk is not read and written as fast as it could be, if anything stands in the way."""
    if reason := info.get("io_fallback"):
        return f" ({reason})"
    if info["io_engine"] == "io_uring" and info.get("disks") and not info.get("registered_buffers"):
        return " without registered buffers (RLIMIT_MEMLOCK is too low)"
    return ""
