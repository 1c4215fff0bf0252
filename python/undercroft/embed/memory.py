"""Memory of a cache, and of the program above it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from undercroft.config import OPTIONS
from undercroft.units import Amount

if TYPE_CHECKING:
    from undercroft._core import Arena, Copier
    from undercroft.config import UndercroftConfig

[_HOST_MEMORY] = [option for option in OPTIONS if option.name == "host_memory"]
_BYTES, _BLOCKS = 2 << 30, 256
"""Default of ``host_memory``: so many bytes, or blocks if these are more. Blocks only pass through it, on their way
between the disk and the program's pool."""


class Attachment(NamedTuple):
    """The engine's arena in this process."""

    arena: Arena
    copier: Copier
    session: int


def span(memory: Any) -> tuple[int, int]:
    """The address and the size of a writable buffer, or of such a pair. Raises ValueError."""
    if isinstance(memory, tuple):
        address, size = map(int, memory)
    else:
        view = np.frombuffer(memory, dtype=np.uint8)
        if not view.flags.writeable:
            raise ValueError("the memory is read-only; loads write into it")
        address, size = int(view.ctypes.data), view.nbytes
    if address <= 0 or size <= 0:
        raise ValueError(f"a region of {size} bytes at {address}")
    return address, size


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Addresses with sizes in ascending order, those that overlap or touch as one."""
    found: list[tuple[int, int]] = []
    for address, size in sorted(spans):
        if found and address <= sum(found[-1]):
            begin, before = found.pop()
            found.append((begin, max(before, address + size - begin)))
        else:
            found.append((address, size))
    return found


def with_small_memory(config: UndercroftConfig, given: Mapping[str, Any], block_bytes: int) -> UndercroftConfig:
    """``config`` with little host memory, unless its size is an option: among ``given``, or of the environment, or that
    of a server. ``block_bytes``: size of a block of all groups, or 0 if it is not known."""
    if config.server or "host_memory" in given or os.environ.get(_HOST_MEMORY.env, "") != "":
        return config
    return dataclasses.replace(config, host_memory=Amount(size=max(_BYTES, _BLOCKS * block_bytes)))
