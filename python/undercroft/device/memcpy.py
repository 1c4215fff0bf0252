"""Batches of copies between host and device, thousands of copies in one call if possible.

The functions, the best first: the driver's batched copy (12.8 and newer), the driver's single copy in a loop, vLLM's
own operator. All take addresses, so they copy any memory of the process. The operator comes last: with a driver older
than 12.8 it drops the errors of single copies.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import torch

from undercroft.device import driver

_BATCH_SINCE = 12080
"""Interface version (CUDA 12.8) of the driver's `cuMemcpyBatchAsync`: it has the arguments that this file uses."""
_ACCESS_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a copy reads its source when the stream reaches the copy, not earlier."""
_ACCESS_IN_ANY_ORDER = 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_ANY: a copy may read its source as soon as it is queued."""

MAX_COPIES = 4096
"""Most copies of one call. A driver has crashed on a batch of 51,828 copies. A call costs little."""
_PREFER_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, a hint."""


class BatchedCopy(Protocol):
    """Queues copies on the current PyTorch stream, whose handle is ``stream``. The caller may then reuse the arrays."""

    name: str

    def __call__(
        self, destinations: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int, *, fixed: bool
    ) -> None:
        """``fixed``: see `undercroft.device.streams.Streams.copy`. Raises RuntimeError if the driver refuses."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class VllmCopy:
    """``swap_blocks_batch`` of vLLM's extension."""

    name = "vllm swap_blocks_batch"

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __call__(
        self, destinations: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int, *, fixed: bool
    ) -> None:
        """See `BatchedCopy`."""
        for begin in range(0, sizes.size, MAX_COPIES):
            part = slice(begin, begin + MAX_COPIES)
            arrays = (torch.from_numpy(np.array(array[part])) for array in (sources, destinations, sizes))
            self._operator(*arrays, fixed)


class DriverBatch:
    """``cuMemcpyBatchAsync``."""

    name = "cuMemcpyBatchAsync"

    def __init__(self, function: Any) -> None:
        self._function = function
        self._attributes = {
            fixed: _Attributes(source_access_order=order, flags=_PREFER_OVERLAP)
            for fixed, order in ((False, _ACCESS_IN_STREAM_ORDER), (True, _ACCESS_IN_ANY_ORDER))
        }
        self._attributes_begin = ctypes.c_size_t(0)

    def __call__(
        self, destinations: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int, *, fixed: bool
    ) -> None:
        """See `BatchedCopy`."""
        arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in (destinations, sources, sizes)]
        for begin in range(0, sizes.size, MAX_COPIES):
            failed = ctypes.c_size_t(0)
            code = self._function(
                *(array.ctypes.data + begin * array.itemsize for array in arrays),
                min(MAX_COPIES, sizes.size - begin),
                ctypes.addressof(self._attributes[fixed]),
                ctypes.addressof(self._attributes_begin),
                1,
                ctypes.addressof(failed),
                stream,
            )
            if code:
                place = f" at {begin + failed.value}" if failed.value < sizes.size else ""
                raise RuntimeError(f"cuMemcpyBatchAsync of {sizes.size} copies failed with error {code}{place}")


class DriverLoop:
    """``cuMemcpyAsync``, once for each copy."""

    name = "cuMemcpyAsync"

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(
        self, destinations: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int, *, fixed: bool
    ) -> None:
        """See `BatchedCopy`."""
        for destination, source, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            if code := self._function(destination, source, size, stream):
                raise RuntimeError(f"cuMemcpyAsync of {size} bytes failed with error {code}")


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
    batch = _entry_point(library, b"cuMemcpyBatchAsync", _BATCH_SINCE)
    if batch is not None:
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_uint,
            *[ctypes.c_void_p] * 3,
            ctypes.c_size_t,
            *[ctypes.c_void_p] * 2,
            ctypes.c_size_t,
            *[ctypes.c_void_p] * 2,
        )
        return DriverBatch(prototype(batch))
    single = library.cuMemcpyAsync
    single.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    single.restype = ctypes.c_uint
    return DriverLoop(single)


def _entry_point(library: Any, name: bytes, version: int) -> int | None:
    """Address of a driver function in an interface version; None if the driver is older."""
    try:
        find = library.cuGetProcAddress_v2
    except AttributeError:
        return None
    find.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
    find.restype = ctypes.c_uint
    address = ctypes.c_void_p()
    status = ctypes.c_int()
    code = find(name, ctypes.addressof(address), version, 0, ctypes.addressof(status))
    return None if code else address.value
