"""Functions of the CUDA driver over the streams of `ManualStreams`. The core calls them by their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manual_streams import Event, ManualStreams, Queue

NOT_READY, REFUSED = 600, 999
TABLE = 504
"""Entries of the kernel's table, and, for each page, the first four of them."""
_NUMBER, _POINTER, _SIZE = ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t


class ManualDriver:
    """Handles of streams and of events are their numbers."""

    def __init__(self, streams: ManualStreams) -> None:
        self.streams = streams
        self.events: list[Event | None] = [None]
        """By their handles; None until an event is recorded."""
        self.kernel_error = 0
        """The driver's answer to the kernel's text."""
        self.errors: list[Exception] = []
        """What went wrong in calls from the core, which sees only an error's number."""
        kinds: list[tuple[Callable[..., int], list[Any]]] = [
            (self._copy, [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE]),
            (self._create, [_POINTER, _NUMBER]),
            (self._record, [_SIZE, _SIZE]),
            (self._query, [_SIZE]),
            (self._wait, [_SIZE, _SIZE, _NUMBER]),
            (self._load, [_POINTER, ctypes.c_char_p]),
            (self._find, [_POINTER, _SIZE, ctypes.c_char_p]),
            (self._launch, [_SIZE, *[_NUMBER] * 7, _SIZE, _POINTER, _POINTER]),
        ]
        self._kept = [ctypes.CFUNCTYPE(_NUMBER, *types)(self._checked(call)) for call, types in kinds]
        self.addresses = [ctypes.cast(function, _POINTER).value or 0 for function in self._kept]

    def handle(self, stream: Queue) -> int:
        return self.streams.queues.index(stream) + 1

    def _stream(self, handle: int) -> Queue:
        return self.streams.queues[handle - 1]

    def _checked(self, call: Callable[..., int]) -> Callable[..., int]:
        def checked(*arguments: Any) -> int:
            try:
                return call(*arguments)
            except Exception as error:
                self.errors.append(error)
                return REFUSED

        return checked

    def _copy(self, to: int, source: int, sizes: int, count: int, *more: int) -> int:
        arrays = [(ctypes.c_uint64 * count).from_address(array)[:] for array in (to, source, sizes)]
        self.streams.copies(self._stream(more[-1]), list(zip(*arrays, strict=True)))
        return 0

    def _create(self, made: int, flags: int) -> int:
        assert flags == 2, "events of which nobody asks the time"
        ctypes.c_size_t.from_address(made).value = len(self.events)
        self.events.append(None)
        return 0

    def _record(self, event: int, stream: int) -> int:
        self.events[event] = self.streams.record(self._stream(stream))
        return 0

    def _query(self, event: int) -> int:
        recorded = self.events[event]
        if recorded is None or self.streams.happened(recorded):
            return 0
        self.streams.step()
        return NOT_READY

    def _wait(self, stream: int, event: int, flags: int) -> int:
        recorded = self.events[event]
        if recorded is not None:
            self.streams.wait(self._stream(stream), recorded)
        return 0

    def _load(self, module: int, text: bytes) -> int:
        assert b".visible .entry move_pages(" in text
        ctypes.c_size_t.from_address(module).value = 1
        return self.kernel_error

    def _find(self, kernel: int, module: int, name: bytes) -> int:
        assert name == b"move_pages"
        ctypes.c_size_t.from_address(kernel).value = 2
        return 0

    def _launch(self, kernel: int, grid: int, *more: int) -> int:
        stream, parameters = more[6:8]
        places = (ctypes.c_size_t * 5).from_address(parameters)[:]
        table = (ctypes.c_uint64 * TABLE).from_address(places[0])[:]
        pages, to_pages = (ctypes.c_uint32.from_address(place).value for place in places[1:3])
        shards, shard_bytes = (ctypes.c_uint64.from_address(place).value for place in places[3:5])
        assert grid % pages == 0
        moves = []
        for cta in range(grid):
            block, page = divmod(cta, pages)
            address, stride, size, offset = table[4 * page : 4 * page + 4]
            ends = [shards + block * shard_bytes + offset, address + table[4 * pages + block] * stride]
            assert all(number % 16 == 0 for number in (*ends, size))
            moves.append((*(reversed(ends) if to_pages else ends), size))
        self.streams.kernel(self._stream(stream), moves)
        return 0
