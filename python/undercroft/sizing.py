"""Turns configured amounts into bytes, from the memory that is available on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from undercroft.config import UndercroftConfig
from undercroft.errors import ConfigError
from undercroft.units import Amount, format_size

_MIN_HOST_MEMORY = 16 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one engine, in bytes."""

    host_memory: int
    promotion_memory: int
    pin_memory: int


def resolve_sizes(config: UndercroftConfig, ranks: int = 1) -> Sizes:
    """The engine's sizes on this machine. Raises ConfigError for a size that is impossible here.

    ``ranks``: data-parallel ranks on this machine. With a disk all ranks use one engine. Without a disk each rank has
    an engine with an equal part of the memory.
    """
    from undercroft import _core

    available = _core.available_memory()
    host = config.host_memory.of(available)
    if host > available:
        raise ConfigError(
            f"undercroft: host_memory = {config.host_memory} is more than the {format_size(available)} of memory "
            'available to this process. Choose less, or a percentage such as "25%".'
        )
    parts = 1 if config.disk_path else ranks
    host //= parts
    if host < _MIN_HOST_MEMORY:
        least = f"at least {format_size(_MIN_HOST_MEMORY)} are needed"
        if parts > 1:
            least = f"that is {format_size(host)} for each of {parts} data-parallel ranks; {least} for each"
        elif str(config.host_memory) != format_size(host):
            least = f"that is {format_size(host)}; {least}"
        raise ConfigError(f"undercroft: host_memory = {config.host_memory}: {least}.")
    return Sizes(
        host,
        _part_of(host, "promotion_memory", config.promotion_memory, parts),
        _part_of(host, "pin_memory", config.pin_memory, parts),
    )


def _part_of(host: int, name: str, amount: Amount, parts: int) -> int:
    """The bytes of an option that is a part of the engine's host memory."""
    size = amount.of(host * parts) // parts
    if size > host:
        raise ConfigError(
            f"undercroft: {name} = {amount} is more than host_memory ({format_size(host)}). "
            "Choose at most that, or a percentage of it."
        )
    return size
