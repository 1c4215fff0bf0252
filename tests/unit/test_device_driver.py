"""Questions to the CUDA driver, with a stand-in for it; its numbers are those of NVIDIA's header."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from undercroft.device import driver


class Driver:
    def __init__(self, value: int, code: int = 0) -> None:
        self.value = value
        self.code = code
        self.asked: list[tuple[int, int]] = []
        self.mode: int | None = None

    def cuDeviceGetAttribute(self, value: Any, attribute: ctypes.c_int, device: ctypes.c_int) -> int:  # noqa: N802
        self.asked.append((attribute.value, device.value))
        value._obj.value = self.value
        return self.code

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.mode = mode._obj.value
        return 0


def test_registered_memory_is_used_unless_the_device_knows_it_by_another_address() -> None:
    assert driver.why_not_pinnable(Driver(1), 3) is None
    reason = driver.why_not_pinnable(Driver(0), 3)
    assert reason is not None and "cannot use host addresses of registered memory" in reason
    # A driver that does not know the question is an ordinary one.
    assert driver.why_not_pinnable(Driver(0, code=1), 3) is None
    asked = Driver(1)
    driver.why_not_pinnable(asked, 3)
    assert asked.asked == [(91, 3)]


def test_linux_under_windows_is_detected_by_its_kernel(tmp_path: Path) -> None:
    release = tmp_path / "osrelease"
    release.write_text("5.15.167.4-microsoft-standard-WSL2\n")
    assert driver.is_wsl(release)
    release.write_text("6.8.0-51-generic\n")
    assert not driver.is_wsl(release)
    assert not driver.is_wsl(tmp_path / "none")


def test_a_thread_that_registers_may_do_so_during_a_capture() -> None:
    one = Driver(1)
    driver.allow_during_capture(one)
    assert one.mode == 2


def test_numbers_are_those_of_the_driver_s_header() -> None:
    found = importlib.util.find_spec("nvidia")
    places = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    headers = [header for place in places for header in place.glob("*/include/cuda.h")]
    if not headers:
        pytest.skip("this PyTorch brings no cuda.h")
    text = headers[0].read_text(encoding="utf-8")
    names = {
        "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": driver.HOST_POINTER_FOR_REGISTERED_MEMORY,
        "CU_STREAM_CAPTURE_MODE_RELAXED": driver.CAPTURE_MODE_RELAXED,
    }
    for name, number in names.items():
        match = re.search(rf"\b{name}\s*=\s*(\d+)", text)
        assert match is not None and int(match[1]) == number, name
