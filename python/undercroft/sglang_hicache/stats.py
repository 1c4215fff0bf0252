"""The back end's figures, as SGLang asks for them."""

from __future__ import annotations

import threading
from typing import Any

_CALLS_MAX = 10_000
"""Most calls that wait for SGLang to ask."""


class Stats:
    """Loads and saves since SGLang has last asked. Bandwidths are in GB/s, as in SGLang's own back ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: list[tuple[int, float]] = []
        self._saves: list[tuple[int, float]] = []

    def note(self, pages: int, size: int, seconds: float, *, is_load: bool) -> None:
        """A call has loaded or kept so many pages, of ``size`` bytes together."""
        with self._lock:
            calls = self._loads if is_load else self._saves
            # Without metrics SGLang never asks.
            del calls[:-_CALLS_MAX]
            calls.append((pages, size / 1e9 / max(seconds, 1e-9)))

    def take(self) -> Any:
        """SGLang's ``StorageMetrics`` of these calls, which are forgotten."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            loads, self._loads = self._loads, []
            saves, self._saves = self._saves, []
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in saves],
            prefetch_bandwidth=[speed for _, speed in loads],
            backup_bandwidth=[speed for _, speed in saves],
        )
