"""The engine that a process uses, and its log line at start."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from undercroft.config import OPTIONS
from undercroft.log import follow_core, log_core_lines
from undercroft.sizing import resolve_sizes
from undercroft.units import format_size

if TYPE_CHECKING:
    from undercroft._core import Engine
    from undercroft.config import UndercroftConfig


def open_engine(config: UndercroftConfig, socket: str | None = None, ranks: int = 1) -> Engine:
    """The server's engine if a server is configured. Else an engine in this process, or the engine of the process that
    has the directories open.

    With ``socket`` the engine is always in this process, and listens at this socket. ``ranks``: data-parallel ranks of
    this vLLM on this machine. Raises ConfigError or StoreError.
    """
    from undercroft import _core

    follow_core()
    return _core.Engine(engine_options(config, socket, ranks))


def close_engine(engine: Engine) -> None:
    """Finish the writes in flight (bounded), and log the loss: the process may end before another thread would."""
    engine.close()
    log_core_lines()


def engine_options(config: UndercroftConfig, socket: str | None = None, ranks: int = 1) -> dict[str, Any]:
    """The options for `_core.Engine`, by name, with sizes in bytes. Raises ConfigError."""
    scopes = ("engine", "session") if socket is None else ("engine",)
    given = {option.name: getattr(config, option.name) for option in OPTIONS if option.scope in scopes}
    for name in ("host_memory", "promotion_memory", "pin_memory", "disk_path", "disk_capacity"):
        # These sizes are converted to bytes below. The sizes of a server's engine are the server's options.
        del given[name]
    if given.get("server"):
        return given
    sizes = resolve_sizes(config, ranks)
    return given | {
        "host_memory": sizes.host_memory,
        "promotion_memory": sizes.promotion_memory,
        "pin_memory": sizes.pin_memory,
        "disks": disks(config),
        **({"share": True} if socket is None else {"socket": socket}),
    }


def disks(config: UndercroftConfig) -> list[dict[str, Any]]:
    """The directories for `_core.Engine`. A share is a share of the directory's filesystem."""
    amount = config.disk_capacity
    capacity = {"share": amount.share} if amount.size is None else amount.size
    return [{"path": path, "capacity": capacity} for path in config.disk_path]


def io_engine(info: dict[str, Any]) -> str:
    """The IO engine that reads and writes the disks; empty without a disk tier. ``info``: of `_core.Engine.info`."""
    return str(info.get("io_engine", "")) if info.get("disks") else ""


def whose(engine: Engine, config: UndercroftConfig) -> str:
    """The process that owns the engine, for the log; empty if this process owns it."""
    if config.server:
        return f"server {config.server}"
    if engine.is_shared:
        return f"disk_path is in use, shared with the engine at {engine.arena.socket}"
    return ""


def start_line(
    info: dict[str, Any],
    namespace: str,
    where: str = "",
    tokens_in: Callable[[int], int] | None = None,
    index_bytes: Callable[[int], int] | None = None,
) -> str:
    """One line on configuration and findings. ``info``: the result of `_core.Engine.info`.

    ``where``: the process that has the engine, if it is another. ``tokens_in``: returns the tokens of the model that a
    tier with a capacity in bytes holds. ``index_bytes``: returns the bytes of the index for a number of tokens.
    """
    if not info:
        return f"undercroft: {where} does not answer yet; vLLM serves without it until then; namespace {namespace[:12]}"

    def size(capacity: int) -> str:
        return format_size(capacity) + (f" ({tokens_in(capacity):,} tokens)" if tokens_in is not None else "")

    host = f"host memory {size(info['host_memory'])}"
    if info.get("huge_pages"):
        host += " in huge pages"
    parts = [where, host] if where else [host]
    for disk in info.get("disks", ()):
        if disk["health"] == "unavailable":
            parts.append(f"disk {disk['path']} cannot be used now")
            continue
        access = "O_DIRECT" if disk["o_direct"] else "buffered (no O_DIRECT here)"
        parts.append(
            f"disk {disk['path']} {size(disk['capacity'])}, {access}, {disk['blocks_recovered']} blocks recovered"
        )
    if not info.get("disks"):
        parts.append("no disk tier")
    if info.get("remote"):
        exposure = info["remote"].get("exposure")
        parts.append(f"remote {info['remote']['url']}" + (f" (warning: {exposure})" if exposure else ""))
    if tokens_in is not None and index_bytes is not None:
        tiers = [info["host_memory"], *(disk["capacity"] for disk in info.get("disks", ()) if "capacity" in disk)]
        parts.append(f"index up to {format_size(sum(index_bytes(tokens_in(tier)) for tier in tiers))}")
    if name := io_engine(info):
        parts.append(f"IO engine {name}{_shortfall(info)}")
    parts.append(f"namespace {namespace[:12]}")
    return "undercroft: " + "; ".join(parts)


def _shortfall(info: dict[str, Any]) -> str:
    """The reason why the disk is read and written more slowly than possible, or empty."""
    if reason := info.get("io_fallback"):
        return f" ({reason})"
    if info["io_engine"] == "io_uring" and not info.get("registered_buffers"):
        return " without registered buffers (RLIMIT_MEMLOCK is too low)"
    return ""
