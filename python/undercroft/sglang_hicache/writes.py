"""Lets saves wait for the disk, so that a burst of them is written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from undercroft.errors import UndercroftError

if TYPE_CHECKING:
    from undercroft._core import Engine

_ROOM = 0.4
"""Part of host memory that may wait to be written. The engine writes nothing that comes when half of it waits: the rest
is for slots that are larger than their pages, and for saves that do not wait."""
_PIECE = 0.1
"""Part of host memory for which a save waits at a time."""
_PIECE_BYTES = 16 << 20
"""The same while an engine of another process has not told the size of its host memory."""
_BURST_S = 30.0
"""Most seconds of waits, one after the other, until saves no longer wait. Each second without a wait gives one back."""
_STEP_S = 0.005


class Writes:
    """What waits to be written to the disks of an engine. All methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free = self._taken = 0.0
        """Bytes that had room at the last look, and those of saves since then."""
        self._stuck = float("inf")
        """Bytes that waited when a wait ended in which nothing was written."""
        self._waited, self._ended = 0.0, time.monotonic()
        """Seconds of waits that count, and when the last one ended."""
        self._host = 0

    @property
    def piece(self) -> int:
        """Bytes for which a save waits at a time."""
        return int(_PIECE * self._host_bytes()) or _PIECE_BYTES

    def wait(self, size: int, until: float) -> None:
        """Wait until so many bytes have room to wait for the disk, at the latest until then (`time.monotonic`)."""
        if self._taken + size <= self._free / 2:
            # The other half is for other processes, which have the same room.
            self._taken += size
            return
        began = time.monotonic()
        self._waited = max(0.0, self._waited - (began - self._ended))
        until = min(until, began + _BURST_S - self._waited)
        first = queued = self._queued()
        room = _ROOM * self._host_bytes()
        while queued and queued + size > room and queued < self._stuck and time.monotonic() < until:
            time.sleep(_STEP_S)
            queued = self._queued()
        is_stuck = queued and queued + size > room and queued >= min(first, self._stuck)
        self._stuck = queued if is_stuck else float("inf")
        self._free, self._taken = room - queued, size
        self._ended = time.monotonic()
        self._waited += self._ended - began

    def _host_bytes(self) -> int:
        """Host memory of the engine; 0 while that is not known."""
        if not self._host:
            self._host = int(self._engine.stats().get("host_capacity_bytes", 0))
        return self._host

    def _queued(self) -> int:
        """Bytes that wait to be written; 0 if the engine cannot tell."""
        from undercroft import _core

        try:
            answer = _core.operate(self._engine.arena.socket, {"drained": {}}, timeout_s=0.5)
        except UndercroftError:
            return 0
        return int(answer.get("queued_bytes", 0))
