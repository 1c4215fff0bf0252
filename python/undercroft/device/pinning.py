"""Registers the arena as pinned memory of this process, in the background: the device then copies at full speed.

Every process that maps the arena registers for itself. Registering is slow (it pins every page), so it runs in chunks
on a thread of its own; until a chunk is registered, its blocks are copied unpinned.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator

from undercroft.log import logger

PIN_CHUNK = 32 << 20
"""Fewest bytes registered at once, a power of two. The process's launches may wait for a whole registration: some
milliseconds. A copy must not cross from one registration into the next."""
MAX_CHUNKS = 4096
"""Most registrations of one arena. Eight processes then keep well below 65,536, where drivers have failed."""
TURN_PAUSE_S = 0.001
"""Pause before the next attempt to have the turn, while another process registers."""


def chunk_bytes(size: int) -> int:
    """Bytes registered at once of an arena of ``size`` bytes."""
    chunk = PIN_CHUNK
    while chunk * MAX_CHUNKS < size:
        chunk *= 2
    return chunk


class Turns:
    """Lets one process at a time register its mapping of a file.

    The driver pins pages under locks of the whole machine. A process that waits for them holds its own locks, which its
    launches need as well, so the ranks wait for each other here instead.
    """

    def __init__(self, descriptor: int | None) -> None:
        """``descriptor``: of the file, which every process may have been given by the same open; None: no others."""
        self._file: int | None = None
        if descriptor is not None:
            # A lock belongs to an open: each process needs its own.
            with contextlib.suppress(OSError):
                self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._is_shared = descriptor is not None

    def claim(self, stop: threading.Event) -> str | None:
        """Tell the engine, until `close`, that a part of the file is pinned: it gives none of it back to the system.

        A device would go on to copy from and to the old pages. Returns the reason why that cannot be told.
        """
        if self._file is None:
            return "the arena cannot be opened again" if self._is_shared else None
        lock = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
        while True:
            try:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
                return None
            except (BlockingIOError, PermissionError):
                # The engine is giving a part back just now.
                if stop.wait(TURN_PAUSE_S):
                    return "the pinner was closed"
            except OSError as error:
                return str(error)

    @contextlib.contextmanager
    def turn(self, stop: threading.Event) -> Iterator[bool]:
        """Wait for the turn and keep it for the body. False, and no turn, if ``stop`` is set before."""
        while not stop.is_set() and not self._take():
            stop.wait(TURN_PAUSE_S)
        try:
            yield not stop.is_set()
        finally:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _take(self) -> bool:
        if self._file is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ArenaPinner:
    """Keeps the first `pinned_bytes` bytes of a region registered until it is closed."""

    def __init__(
        self,
        address: int,
        size: int,
        register: Callable[[int, int], str | None],
        unregister: Callable[[int], str | None],
        *,
        populate: Callable[[int, int], None] | None = None,
        turns: Turns | None = None,
        chunk: int | None = None,
    ) -> None:
        """``register(address, size)`` and ``unregister(address)`` return None, or the driver's refusal.

        ``populate(offset, size)`` puts memory behind a part of the region, and raises OSError when there is none.
        ``turns``: closed with the pinner. ``chunk``: `chunk_bytes` of the region if None.
        """
        self._address = address
        self._size = size
        self._register = register
        self._unregister = unregister
        self._populate = populate
        self._turns = turns or Turns(None)
        self._chunk = chunk or chunk_bytes(size)
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
        # One thread registers and unregisters: the driver keeps the last error per thread, and no other sees it.
        registered: list[int] = []
        refusal = self._turns.claim(self._stop)
        if refusal is not None and not self._stop.is_set():
            self._report(refusal)
        for begin in range(0, self._size if refusal is None else 0, self._chunk):
            size = min(self._chunk, self._size - begin)
            took, refusal = self._pin(begin, size)
            if took is None:
                break
            if refusal is not None:
                self._report(refusal)
                break
            registered.append(self._address + begin)
            self._pinned = begin + size
            # The driver holds a lock while it registers, which the model's launches need: each gets half the time.
            self._stop.wait(took)
        self._settled.set()
        self._stop.wait()
        self._pinned = 0
        for address in reversed(registered):
            if (refusal := _refusal(self._unregister, address)) is not None:
                logger.warning("undercroft: unregistering pinned memory failed: %s", refusal)
        self._turns.close()

    def _pin(self, begin: int, size: int) -> tuple[float | None, str | None]:
        """Seconds that registering took, None if the pinner was closed before; and why the part is not pinned."""
        with self._turns.turn(self._stop) as has_turn:
            if not has_turn:
                return None, None
            if self._populate is not None:
                # Without this the driver faults the pages in, in its lock, and they stay small: the kernel does not
                # collapse pinned pages.
                try:
                    self._populate(begin, size)
                except OSError as error:
                    return 0.0, str(error)
            started = time.monotonic()
            refusal = _refusal(self._register, self._address + begin, size)
            return time.monotonic() - started, refusal

    def _report(self, refusal: str) -> None:
        logger.warning(
            "undercroft: %d of %d bytes of host memory are pinned; the driver refused more (%s). Copies of the rest "
            "are slower. Lower host_memory, or raise the limit on locked memory (ulimit -l, or memlock of the "
            "container).",
            self._pinned,
            self._size,
            refusal,
        )


def _refusal(call: Callable[..., str | None], *args: int) -> str | None:
    """The driver's refusal, or the error that was raised: a caller that closes the pinner waits for the answer."""
    try:
        return call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
