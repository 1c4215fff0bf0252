"""Turns configured amounts into bytes, from the available memory and the free disk space of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from undercroft.config import UndercroftConfig
from undercroft.errors import ConfigError
from undercroft.units import format_size

_MIN_HOST_MEMORY = 16 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one engine, in bytes."""

    host_memory: int
    promotion_memory: int
    disks: list[tuple[str, int]]
    """Each directory with its capacity."""


def resolve_sizes(config: UndercroftConfig, ranks: int = 1) -> Sizes:
    """The engine's sizes on this machine. Raises ConfigError for a size that is impossible here.

    ``ranks``: data-parallel ranks on this machine. With a disk they use one engine, and otherwise have one each, of an
    equal part of the memory.
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
        each = f" for each of {parts} data-parallel ranks" if parts > 1 else ""
        raise ConfigError(
            f"undercroft: host_memory = {config.host_memory} is {format_size(host)}{each}; "
            f"at least {format_size(_MIN_HOST_MEMORY)} are needed."
        )
    promotion = config.promotion_memory.of(host * parts) // parts
    if promotion > host:
        raise ConfigError(
            f"undercroft: promotion_memory = {config.promotion_memory} is more than host_memory "
            f"({format_size(host)}). Choose at most that, or a percentage of it."
        )
    try:
        return Sizes(host, promotion, _disks(config))
    except OSError as error:
        raise ConfigError(f"undercroft: disk_path = {error.filename}: {error.strerror}.") from error


def _disks(config: UndercroftConfig) -> list[tuple[str, int]]:
    places = [_existing_parent(path) for path in config.disk_path]
    devices = [place.stat().st_dev for place in places]
    disks = []
    for path, place, device in zip(config.disk_path, places, devices, strict=True):
        usage = os.statvfs(place)
        space = usage.f_bavail * usage.f_frsize + _allocated(Path(path))
        capacity = config.disk_capacity.of(space // devices.count(device))
        if capacity > space:
            raise ConfigError(
                f"undercroft: disk_capacity = {config.disk_capacity} is more than the {format_size(space)} that "
                f'disk_path {path} has free or holds already. Choose less, or a percentage such as "50%".'
            )
        disks.append((path, capacity))
    return disks


def _existing_parent(path: str) -> Path:
    """The directory itself, or the nearest one above it that exists (it will be made there)."""
    place = Path(path)
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"undercroft: disk_path = {path}: {place} is not a directory.")
    return place


def _allocated(directory: Path) -> int:
    """Bytes the files of a directory occupy: an existing store counts as space that is ours."""
    if not directory.is_dir():
        return 0
    return sum(entry.stat().st_blocks * 512 for entry in directory.iterdir() if entry.is_file())
