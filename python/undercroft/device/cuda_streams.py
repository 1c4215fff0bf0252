"""`Streams` of a CUDA device through PyTorch, and the registration of host memory with the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from undercroft._core import Arena, BlockPieces, StagedCopies
from undercroft.device import driver
from undercroft.device.memcpy import BatchedCopy, batched_copy
from undercroft.device.pinning import ArenaPinner, EnginePages, Turns, Unsupported

_LIKE_THE_MODEL = 0
_URGENT = -1
"""Priorities of streams. The model's stream has the default priority, 0, which is the lowest."""
_NOT_SUPPORTED = 801
"""cudaErrorNotSupported: what a device in confidential computing answers for every size."""
_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process, not only for the context that registers."""


class CudaStreams:
    """See `undercroft.device.streams.Streams`."""

    def __init__(self, device: torch.device, copy: BatchedCopy | None = None) -> None:
        """``copy``: queues batches of copies; None: the best function available. Raises RuntimeError without one."""
        self._device = device
        self._copy = copy or batched_copy()
        self.copy_name = self._copy.name
        """Name of the function that queues batches of copies, for people."""

    def select(self) -> None:
        """See `Streams.select`."""
        torch.cuda.set_device(self._device)
        # The model runner's thread may capture a graph while this thread makes buffers or waits for its stream.
        driver.allow_during_capture(driver.load())

    def compute(self) -> torch.cuda.Stream:
        """See `Streams.compute`."""
        return torch.cuda.current_stream(self._device)

    def create(self, *, urgent: bool = False) -> torch.cuda.Stream:
        """See `Streams.create`. Raises RuntimeError if the driver makes none."""
        # PyTorch hands out each of its 32 streams again and again, also to the model. The driver's are ours alone.
        # They are never destroyed: lanes last as long as the process.
        with torch.cuda.device(self._device):
            # `torch.cuda.device` alone may leave a new thread without a context, and the driver's call needs one. The
            # first question to the device makes PyTorch create it.
            torch.cuda.mem_get_info(self._device)
            handle = driver.make_stream(driver.load(), _URGENT if urgent else _LIKE_THE_MODEL)
        return torch.cuda.ExternalStream(handle, self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See `Streams.record`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See `Streams.wait`."""
        stream.wait_event(event)

    def happened(self, event: torch.cuda.Event) -> bool:
        """See `Streams.happened`."""
        return bool(event.query())

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See `Streams.seconds`."""
        return float(begin.elapsed_time(end)) / 1e3

    def finish(self, stream: torch.cuda.Stream) -> None:
        """See `Streams.finish`."""
        stream.synchronize()

    def run(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """See `Streams.run`."""
        # vLLM calls hooks with and without inference mode. A tensor made in one mode cannot be written in the other.
        with torch.inference_mode(), torch.cuda.stream(stream):
            work()

    def copy(self, stream: torch.cuda.Stream, pieces: BlockPieces, arena: int, *, to_arena: bool) -> None:
        """See `Streams.copy`."""
        with torch.cuda.stream(stream):
            self._copy(pieces, arena, stream.cuda_stream, to_arena=to_arena)

    def staged(self, stream: torch.cuda.Stream, kernels: torch.cuda.Stream) -> StagedCopies | None:
        """See `Streams.staged`. Raises RuntimeError if the driver refuses the kernel."""
        return self._copy.staged(stream.cuda_stream, kernels.cuda_stream)

    def buffer(self, stream: torch.cuda.Stream, size: int) -> torch.Tensor:
        """See `Streams.buffer`."""
        # Allocate on the stream itself: otherwise work on another stream may still use the memory.
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device=self._device)


def pin(device: torch.device, arena: Arena) -> ArenaPinner:
    """Start to register the arena with the process's CUDA context on ``device``, in turns with other processes."""
    runtime: Any = torch.cuda.cudart()
    library = driver.load()
    why_not = driver.why_not_pinnable(library, torch.cuda.current_device() if device.index is None else device.index)

    def register(start: int, length: int) -> str | None:
        if why_not is not None:
            return why_not
        driver.allow_during_capture(library)
        with torch.cuda.device(device):
            return refusal(runtime, runtime.cudaHostRegister(start, length, _REGISTER_PORTABLE))

    def unregister(start: int) -> str | None:
        with torch.cuda.device(device):
            return refusal(runtime, runtime.cudaHostUnregister(start))

    return ArenaPinner(
        arena.address,
        arena.size,
        register,
        unregister,
        populate=arena.prefault,
        turns=Turns(arena.fileno()),
        # An arena without an engine is populated by nobody else.
        pages=EnginePages(arena.fileno()) if arena.arena_id else None,
    )


def refusal(runtime: Any, code: Any) -> str | None:
    """What the answer ``code`` of a runtime's function says, for people; None if it has succeeded."""
    number = int(code)
    if not number:
        return None
    text = f"{runtime.cudaGetErrorString(code)}, error {number}"
    if number != _NOT_SUPPORTED:
        return text
    return Unsupported(f"{text}: this device registers no host memory, as in confidential computing")
