"""Registers the arena as pinned memory of this process, in the background: the device then copies at full speed.

Every process that maps the arena registers for itself. Registering is slow (it pins every page), so it runs in chunks
on a thread of its own; until a chunk is done, copies of what it holds work unpinned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from undercroft.log import logger

PIN_CHUNK = 128 << 20
"""Bytes registered at once. A copy must not cross from one registration into the next."""


class ArenaPinner:
    """Keeps the first `pinned_bytes` bytes of a region registered until it is closed."""

    def __init__(
        self,
        address: int,
        size: int,
        register: Callable[[int, int], str | None],
        unregister: Callable[[int], str | None],
        chunk: int = PIN_CHUNK,
    ) -> None:
        """``register(address, size)`` and ``unregister(address)`` return None, or what the driver refused with."""
        self._address = address
        self._size = size
        self._register = register
        self._unregister = unregister
        self._chunk = chunk
        self._stop = threading.Event()
        self._pinned = 0
        self._settled = threading.Event()
        # A process that ends without closing must not wait for this thread: the driver unregisters everything itself.
        self._thread = threading.Thread(target=self._run, name="undercroft-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """How much of the region is registered, counted from its start. It only grows."""
        return self._pinned

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, at most ``timeout`` seconds, until nothing more will be registered; whether that is so."""
        return self._settled.wait(timeout)

    def close(self) -> None:
        """Stop, and unregister everything. No copy may be running. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        # One thread does both, since the driver keeps the last error for each thread: a refusal stays here.
        registered: list[int] = []
        for begin in range(0, self._size, self._chunk):
            if self._stop.is_set():
                break
            size = min(self._chunk, self._size - begin)
            started = time.monotonic()
            refusal = self._register(self._address + begin, size)
            if refusal is not None:
                self._report(refusal)
                break
            registered.append(self._address + begin)
            self._pinned = begin + size
            # The driver holds a lock while it registers, and the model's launches need it as well: half the time each.
            self._stop.wait(time.monotonic() - started)
        self._settled.set()
        self._stop.wait()
        self._pinned = 0
        for address in reversed(registered):
            if (refusal := self._unregister(address)) is not None:
                logger.warning("undercroft: unregistering pinned memory failed: %s", refusal)

    def _report(self, refusal: str) -> None:
        logger.warning(
            "undercroft: %d of %d bytes of host memory are pinned; the driver refused more (%s). Copies of the rest "
            "are slower. Lower host_memory, or raise the limit on locked memory (ulimit -l, or memlock of the "
            "container).",
            self._pinned,
            self._size,
            refusal,
        )
