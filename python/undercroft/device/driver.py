"""Calls of the CUDA driver for which PyTorch has no function."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from undercroft.device.pinning import Unsupported

LIBRARY = "libcuda.so.1"

HOST_POINTER_FOR_REGISTERED_MEMORY = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING."""
CAPTURE_MODE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


def load() -> Any:
    """The driver's library. Raises OSError if there is none."""
    return ctypes.CDLL(LIBRARY)


def why_not_pinnable(driver: Any, device: int) -> Unsupported | None:
    """The reason, for people, why copies of registered host memory would fail on this device; None if they work.

    Copies name host addresses. If the device has other addresses for registered memory (WSL2), a batch of such copies
    reads and writes addresses that are not mapped on the device.
    """
    value = ctypes.c_int()
    code = driver.cuDeviceGetAttribute(
        ctypes.byref(value), ctypes.c_int(HOST_POINTER_FOR_REGISTERED_MEMORY), ctypes.c_int(device)
    )
    if code == 0 and value.value == 0:
        where = " (WSL2)" if is_wsl() else ""
        return Unsupported(f"the device cannot use host addresses of registered memory{where}")
    return None


def make_stream(driver: Any, priority: int) -> int:
    """The handle of a new stream of the calling thread's device, which does not wait for the default stream.

    Raises RuntimeError if the driver refuses.
    """
    handle = ctypes.c_void_p()
    code = driver.cuStreamCreateWithPriority(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(priority))
    if code or handle.value is None:
        raise RuntimeError(f"cuStreamCreateWithPriority failed with error {code}")
    return handle.value


def allow_during_capture(driver: Any) -> None:
    """Let the calling thread register memory while another thread captures a CUDA graph.

    Without this setting the driver refuses to register, and the capture may fail: vLLM captures in a mode that forbids
    it to all threads.
    """
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def is_wsl(release: Path = Path("/proc/sys/kernel/osrelease")) -> bool:
    """Whether this is Linux under Windows (WSL), which has another driver."""
    try:
        return "microsoft" in release.read_text(encoding="utf-8").lower()
    except OSError:
        return False
