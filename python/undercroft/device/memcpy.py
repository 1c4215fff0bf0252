"""Batches of copies between host and device, many copies in one call if possible.

The functions, the best first: the driver's batched copy (12.8 and newer), the driver's single copy in a loop, vLLM's
own operator. All take addresses, so they copy any memory of the process. The operator comes last: with a driver older
than 12.8 it drops the errors of single copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from undercroft._core import BlockPieces, CopyBatches, StagedCopies
from undercroft.device import driver

_INTERFACE = 12080
"""Interface version (CUDA 12.8) of the driver's functions: the first with `cuMemcpyBatchAsync`."""
_FUNCTIONS = (
    b"cuMemcpyBatchAsync",
    b"cuEventCreate",
    b"cuEventRecord",
    b"cuEventQuery",
    b"cuStreamWaitEvent",
    b"cuModuleLoadData",
    b"cuModuleGetFunction",
    b"cuLaunchKernel",
)
"""What `CopyBatches` and `StagedCopies` call."""
MAX_COPIES = 4096
"""Most copies of one call of vLLM's operator. A driver has crashed on a batch of 51,828 copies."""


class BatchedCopy(Protocol):
    """Queues copies on the current PyTorch stream, whose handle is ``stream``. The caller may then reuse the arrays.

    One thread at a time queues copies on a stream. The call may wait until earlier copies have run.
    """

    name: str

    def __call__(self, pieces: BlockPieces, arena: int, stream: int, *, to_arena: bool) -> None:
        """``arena``: the arena's address. Raises RuntimeError if the driver refuses."""

    def staged(self, stream: int, kernels: int) -> StagedCopies | None:
        """See `Streams.staged`. Both streams are given by their handles."""


class VllmCopy:
    """``swap_blocks_batch`` of vLLM's extension."""

    name = "vllm swap_blocks_batch"

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __call__(self, pieces: BlockPieces, arena: int, stream: int, *, to_arena: bool) -> None:
        """See `BatchedCopy`."""
        destinations, sources, sizes = ends(pieces, arena, to_arena=to_arena)
        for begin in range(0, sizes.size, MAX_COPIES):
            part = slice(begin, begin + MAX_COPIES)
            arrays = (torch.from_numpy(np.ascontiguousarray(array[part])) for array in (sources, destinations, sizes))
            self._operator(*arrays, False)

    def staged(self, stream: int, kernels: int) -> None:
        """See `BatchedCopy`: there is none."""


class DriverBatch:
    """``cuMemcpyBatchAsync``. The core calls it without Python's lock, which the model's thread needs."""

    name = "cuMemcpyBatchAsync"

    def __init__(self, functions: Sequence[int]) -> None:
        """``functions``: the addresses of `_FUNCTIONS`."""
        self._functions = functions
        self._streams: dict[int, CopyBatches] = {}

    def __call__(self, pieces: BlockPieces, arena: int, stream: int, *, to_arena: bool) -> None:
        """See `BatchedCopy`."""
        self._batches(stream).queue(to_arena, pieces, arena)

    def staged(self, stream: int, kernels: int) -> StagedCopies:
        """See `BatchedCopy`."""
        return StagedCopies(self._batches(stream), kernels)

    def _batches(self, stream: int) -> CopyBatches:
        if stream not in self._streams:
            self._streams[stream] = CopyBatches(self._functions, stream)
        return self._streams[stream]


class DriverLoop:
    """``cuMemcpyAsync``, once for each copy."""

    name = "cuMemcpyAsync"

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, pieces: BlockPieces, arena: int, stream: int, *, to_arena: bool) -> None:
        """See `BatchedCopy`."""
        arrays = ends(pieces, arena, to_arena=to_arena)
        for destination, source, size in zip(*(array.tolist() for array in arrays), strict=True):
            if code := self._function(destination, source, size, stream):
                raise RuntimeError(f"cuMemcpyAsync of {size} bytes failed with error {code}")

    def staged(self, stream: int, kernels: int) -> None:
        """See `BatchedCopy`: there is none."""


def ends(pieces: BlockPieces, arena: int, *, to_arena: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Addresses of destinations and of sources, and sizes in bytes (int64 each), of copies between a device and an
    arena at the address ``arena``."""
    there, offsets, sizes = np.array(pieces.list(), dtype=np.int64).reshape(-1, 3).T
    here = offsets + arena
    return (here, there, sizes) if to_arena else (there, here, sizes)


def batched_copy() -> BatchedCopy:
    """The best function that this process has. Raises RuntimeError if it has none."""
    try:
        return driver_copy(driver.load())
    except OSError as error:
        operator = getattr(torch.ops._C_cache_ops, "swap_blocks_batch", None)
        if operator is not None:
            return VllmCopy(operator)
        raise RuntimeError(
            f"neither the CUDA driver ({error}) nor vLLM's swap_blocks_batch was found; install the NVIDIA driver, or "
            "run inside vLLM"
        ) from None


def driver_copy(library: Any) -> BatchedCopy:
    """The best function of the CUDA driver. ``library``: a loaded ``libcuda``."""
    found = [address for name in _FUNCTIONS if (address := _entry_point(library, name))]
    if len(found) == len(_FUNCTIONS):
        return DriverBatch(found)
    single = library.cuMemcpyAsync
    single.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    single.restype = ctypes.c_uint
    return DriverLoop(single)


def _entry_point(library: Any, name: bytes) -> int | None:
    """Address of a driver's function; None if the driver is too old."""
    try:
        find = library.cuGetProcAddress_v2
    except AttributeError:
        return None
    find.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
    find.restype = ctypes.c_uint
    address = ctypes.c_void_p()
    status = ctypes.c_int()
    code = find(name, ctypes.addressof(address), _INTERFACE, 0, ctypes.addressof(status))
    return None if code else address.value
