"""Registers the arena as pinned memory of this process, in the background: the device then copies at full speed.

Every process that maps the arena registers it for itself. Registration is slow, since it pins every page. So it runs in
chunks on a thread of its own. Until a chunk is registered, its blocks are copied from and to unpinned memory.
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
"""Least bytes of one registration, a power of two. The process's kernel launches may wait some milliseconds for a
whole registration. A copy must not extend over two registrations."""
MAX_CHUNKS = 4096
"""Most registrations of one arena. Eight processes then have far fewer than 65,536, at which drivers have failed."""
POPULATING_PAUSE_S = 0.02
"""Pause between two looks at the pages that the engine has populated."""
POPULATING_STALL_S = 10.0
"""Time without a new page after which the engine populates no more."""
TURN_PAUSE_S = 0.001
"""Pause between two attempts to get the turn while another process registers."""
PROGRESS_S = 30.0
"""Pause between two lines of the log about a registration that lasts: eight ranks with 512 GiB need minutes."""


class Unsupported(str):
    """A refusal to register any memory, which no limit and no smaller ``host_memory`` changes."""

    __slots__ = ()


def chunk_bytes(size: int) -> int:
    """Bytes of one registration for an arena of ``size`` bytes."""
    chunk = PIN_CHUNK
    while chunk * MAX_CHUNKS < size:
        chunk *= 2
    return chunk


_OPEN: set[int] = set()
"""Opens of the arena's file by this module. A forked child would keep the memory, and the lock on it."""


def _opened(descriptor: int, flags: int) -> int:
    """Another open of the file behind a descriptor. Raises OSError."""
    file = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
    _OPEN.add(file)
    return file


def _close(file: int) -> None:
    _OPEN.discard(file)
    os.close(file)


def _in_child() -> None:
    """Put something else in the place of the files: the numbers stay taken until their owners close them."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for file in _OPEN:
        os.dup2(null, file, inheritable=False)
    os.close(null)
    _OPEN.clear()


os.register_at_fork(after_in_child=_in_child)


class Turns:
    """Lets one process at a time register its mapping of a file.

    The driver pins pages under locks of the whole machine. A process that waits for such a lock holds its own locks,
    which its kernel launches need. So the ranks wait for each other here, without these locks.
    """

    def __init__(self, descriptor: int | None) -> None:
        """``descriptor``: the file's. All processes may have descriptors of one open. None: no other process maps."""
        self._file: int | None = None
        if descriptor is not None:
            # A lock belongs to an open of the file, so each process needs an open of its own.
            with contextlib.suppress(OSError):
                self._file = _opened(descriptor, os.O_RDWR)
        self._is_shared = descriptor is not None

    def claim(self, stop: threading.Event) -> str | None:
        """Lock the file until `close`: the engine then frees no part of its memory to the system.

        A device would otherwise go on to copy from and to the old pages. Returns the reason if the lock fails.
        """
        if self._file is None:
            return "the arena cannot be opened again" if self._is_shared else None
        lock = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
        while True:
            try:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
                return None
            except (BlockingIOError, PermissionError):
                # The engine holds the lock while it frees a part.
                if stop.wait(TURN_PAUSE_S):
                    return "the pinner was closed"
            except OSError as error:
                return str(error)

    @contextlib.contextmanager
    def turn(self, stop: threading.Event) -> Iterator[bool]:
        """Wait for the turn, and hold it for the body. Yields False if ``stop`` is set: the body has no turn then."""
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
            _close(self._file)
            self._file = None


class EnginePages:
    """The pages of the arena that exist. The kernel charges a page to the memory group of the process that touches it
    first. The engine populates its arena from the start on, so the pinner waits for it: the memory of a server would
    else count to the containers of the vLLMs."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: the arena's file."""
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = _opened(descriptor, os.O_RDONLY)

    def wait(self, begin: int, size: int, stop: threading.Event) -> None:
        """Wait until the part exists, ``stop`` is set, or the engine populates no more (`POPULATING_STALL_S`). After a
        stall, later calls do not wait."""
        seen, since = -1, time.monotonic()
        while self._file is not None and not stop.is_set():
            try:
                hole = os.lseek(self._file, begin, os.SEEK_HOLE)
            except OSError:
                # A filesystem without holes, as that of reserved huge pages: they belong to no memory group.
                break
            if hole >= begin + size:
                return
            if hole > seen:
                seen, since = hole, time.monotonic()
            if time.monotonic() - since >= POPULATING_STALL_S:
                logger.warning(
                    "undercroft: the engine has populated %d bytes of host memory and goes on no more; this process "
                    "populates the rest to pin it. It counts to this process's container.",
                    hole,
                )
                break
            stop.wait(POPULATING_PAUSE_S)
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            _close(self._file)
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
        pages: EnginePages | None = None,
        chunk: int | None = None,
    ) -> None:
        """``register(address, size)`` and ``unregister(address)`` return None, or the driver's refusal.

        ``populate(offset, size)`` allocates the memory of a part of the region, and raises OSError if there is none.
        ``turns`` and ``pages``: the pinner closes them. Without ``pages`` it waits for no engine. ``chunk``: bytes of
        one registration; None: `chunk_bytes` of the region.
        """
        self._address = address
        self._size = size
        self._register = register
        self._unregister = unregister
        self._populate = populate
        self._turns = turns or Turns(None)
        self._pages = pages
        self._chunk = chunk or chunk_bytes(size)
        self._stop = threading.Event()
        self._pinned = 0
        self._started = self._said = time.monotonic()
        self._settled = threading.Event()
        # Daemon: a process that ends without `close` must not wait for this thread. The driver then unregisters all.
        self._thread = threading.Thread(target=self._run, name="undercroft-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """Number of bytes at the region's start that are registered. It only grows until `close`."""
        return self._pinned

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds for the end of registration. Returns whether it has ended."""
        return self._settled.wait(timeout)

    def stop(self) -> None:
        """Begin to unregister everything. No copy may be running. Idempotent."""
        self._stop.set()

    def close(self) -> None:
        """Unregister everything, and wait for it. No copy may be running. Idempotent."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        # One thread registers and unregisters: the driver keeps the last error of each thread, unseen by others.
        registered: list[int] = []
        refusal = self._turns.claim(self._stop)
        if refusal is not None and not self._stop.is_set():
            self._report(refusal)
        for begin in range(0, self._size if refusal is None else 0, self._chunk):
            size = min(self._chunk, self._size - begin)
            if self._pages is not None:
                self._pages.wait(begin, size, self._stop)
            took, refusal = self._pin(begin, size)
            if took is None:
                break
            if refusal is not None:
                self._report(refusal)
                break
            registered.append(self._address + begin)
            self._pinned = begin + size
            self._say_progress()
            # The driver holds a lock during registration, which the model's launches need. This pause leaves them half
            # of the time.
            self._stop.wait(took)
        if self._pages is not None:
            self._pages.close()
        self._settled.set()
        self._stop.wait()
        self._pinned = 0
        for address in reversed(registered):
            if (refusal := _refusal(self._unregister, address)) is not None:
                logger.warning("undercroft: unregistering pinned memory failed: %s", refusal)
        self._turns.close()

    def _pin(self, begin: int, size: int) -> tuple[float | None, str | None]:
        """Register a part. Returns the seconds (None if the pinner was closed before), and the reason if it failed."""
        with self._turns.turn(self._stop) as has_turn:
            if not has_turn:
                return None, None
            if self._populate is not None:
                # Otherwise the driver would allocate the pages under its lock. They would stay small pages, since the
                # kernel does not collapse pinned pages.
                try:
                    self._populate(begin, size)
                except OSError as error:
                    return 0.0, str(error)
            started = time.monotonic()
            refusal = _refusal(self._register, self._address + begin, size)
            return time.monotonic() - started, refusal

    def _say_progress(self) -> None:
        """One line in a while as long as registration lasts, and one at its end."""
        now = time.monotonic()
        if self._pinned < self._size and now - self._said < PROGRESS_S:
            return
        self._said = now
        logger.info(
            "undercroft: %d of %d bytes of host memory are pinned after %.0f s.",
            self._pinned,
            self._size,
            now - self._started,
        )

    def _report(self, refusal: str) -> None:
        advice = (
            "No setting changes this"
            if isinstance(refusal, Unsupported)
            else "Lower host_memory, or raise the limit on locked memory (ulimit -l, or memlock of the container)"
        )
        logger.warning(
            "undercroft: %d of %d bytes of host memory are pinned; the driver refused more (%s). Copies of the rest "
            "are slower. %s.",
            self._pinned,
            self._size,
            refusal,
            advice,
        )


def _refusal(call: Callable[..., str | None], *args: int) -> str | None:
    """The driver's refusal, or the text of an exception: the pinner's thread must not end before `close`."""
    try:
        return call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
