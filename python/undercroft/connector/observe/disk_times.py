"""How long the operations of each directory took, on the way from the engine to vLLM's frontend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Times = dict[str, list[float]]
"""Place of a directory in ``disk_path`` and direction, as "0 load" -> how many operations took no longer than each of
`undercroft.metrics.DISK_LIMITS_S`, all operations, and the sum of their seconds."""


class DiskTimes:
    """The times since the last report."""

    def __init__(self) -> None:
        self._last: Times = {}

    def since(self, disks: Sequence[dict[str, Any]]) -> Times:
        """The times of the operations that ended since the last call. ``disks``: as in `Engine.info`."""
        now = {
            f"{place} {direction}": [*(found := disk["latency"][direction])["at_most"], found["seconds"]]
            for place, disk in enumerate(disks)
            for direction in ("load", "save")
        }
        last, self._last = self._last, now
        return {key: times for key, all_times in now.items() if any(times := _less(all_times, last.get(key)))}


def added(one: Times, other: Times) -> Times:
    """The times of two reports together."""
    together = dict(one)
    for key, times in other.items():
        together[key] = [a + b for a, b in zip(together[key], times, strict=True)] if key in together else times
    return together


def _less(now: list[float], before: list[float] | None) -> list[float]:
    """The increase. A count that is lower than before has restarted at zero."""
    if before is None or now[-2] < before[-2]:
        return now
    return [a - b for a, b in zip(now, before, strict=True)]
