"""Hourly sums of an engine's counters, kept for a week in the first directory of the disk tier.

The process that has the engine writes them, so they outlive it: `undercroft explain --summary` compares a night with
the night before.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undercroft.log import logger
from undercroft.metrics import ORDERS
from undercroft.reasons import MISSES

if TYPE_CHECKING:
    from undercroft._core import Engine

FILE = "hours.json"
"""Name of the file. `rust/io/src/disk/files.rs` has it among the files that may lie in a directory."""
KEPT = 7 * 24
"""Hours that are kept."""
HOUR_S = 3600
LOOKUPS = ("answered_lookups", "answered_tokens", "answered_device_tokens", "answered_hit_tokens")
MISSED = tuple(f"misses_{reason}" for reason in MISSES)
EVENTS = (*(f"orders_{verb}" for verb in ORDERS), "host_evictions", "disk_evictions", "checksum_failures")
_COUNTERS = (*LOOKUPS, *MISSED, *EVENTS)
Sums = dict[str, int]


@dataclass(slots=True)
class Hours:
    """The sums, by hour since 1970."""

    sums: dict[int, Sums] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Hours:
        """The sums in a directory; none if it has none. Raises OSError if they cannot be read."""
        try:
            found = json.loads((directory / FILE).read_text(encoding="utf-8"))
            return cls({int(hour): dict(sums) for hour, sums in found["hours"].items()})
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError, KeyError, AttributeError):
            # Damaged, or of another version: the sums begin anew.
            return cls()

    def write(self, directory: Path) -> None:
        """Replace the file. Raises OSError."""
        new = directory / f"{FILE}.new"
        try:
            new.write_text(json.dumps({"hours": self.sums}, separators=(",", ":")), encoding="utf-8")
            new.replace(directory / FILE)
        finally:
            new.unlink(missing_ok=True)

    def add(self, hour: int, sums: Sums) -> None:
        """Add counts to an hour, and forget the hours before the last week."""
        of_hour = self.sums.setdefault(hour, {})
        for name, count in sums.items():
            of_hour[name] = of_hour.get(name, 0) + count
        self.sums = {one: kept for one, kept in self.sums.items() if one > hour - KEPT}

    def between(self, begin: int, end: int) -> Sums:
        """The sum over the hours from ``begin`` to before ``end``."""
        total: Sums = {}
        for hour in range(begin, end):
            for name, count in self.sums.get(hour, {}).items():
                total[name] = total.get(name, 0) + count
        return total


class HourlySums:
    """A thread that keeps the sums of an engine in this process.

    The thread alone writes the file: a disk that hangs delays nothing else.
    """

    def __init__(self, engine: Engine, stats: Callable[[], Mapping[str, Any]], interval_s: float = 60.0) -> None:
        """``stats``: returns `_core.Engine.stats`, or nothing while the engine is in another process."""
        self._engine = engine
        self._stats = stats
        self._interval_s = interval_s
        self._last: Mapping[str, Any] = {}
        self._hours: Hours | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undercroft-hours", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the last counts, and end. Call this before the engine is closed."""
        self._closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._closed.wait(self._interval_s)
            try:
                self._note(self._stats(), int(time.time() // HOUR_S))
            except Exception as error:
                logger.debug("undercroft: the hourly sums are not written: %s", error)

    def _note(self, stats: Mapping[str, Any], hour: int) -> None:
        """Add the increase of the counters to this hour."""
        if not stats:
            return
        since = {name: stats.get(name, 0) - self._last.get(name, 0) for name in _COUNTERS}
        if any(count < 0 for count in since.values()):
            # The engine has taken the place of another, and has counted from zero.
            since = {name: stats.get(name, 0) for name in _COUNTERS}
        self._last = stats
        found = {name: count for name, count in since.items() if count}
        disks = self._engine.info().get("disks", ())
        if found and disks:
            directory = Path(disks[0]["path"])
            self._hours = self._hours or Hours.read(directory)
            self._hours.add(hour, found)
            self._hours.write(directory)
