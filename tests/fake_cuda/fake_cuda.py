"""A CUDA without a GPU, for PyTorch's own CUDA build: compiled here, loaded before everything else of a process.

See docs/testing.md for its use and its limits, and `fake.h` for how it works. In the process that has it, `Fake` reads
the counts.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / ".run" / "fake_cuda"
NAME = "libcuda.so.1"
COUNTERS = (
    "launches",
    "batches",
    "descriptors",
    "single_copies",
    "pageable_copies",
    "events_recorded",
    "host_allocations",
    "device_allocations",
    "registrations",
    "unregistrations",
    "streams",
)


def missing() -> str | None:
    """The requirement of the fake that this machine lacks; None if it has all."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is no CUDA build"
    if _headers() is None:
        return "no wheel of this environment brings cuda.h"
    if shutil.which("g++") is None:
        return "there is no g++"
    return None


def environment(devices: int = 2, own_device: int | None = None) -> dict[str, str]:
    """The environment of a process that believes in so many GPUs. A context on another one than its own is noted."""
    environment = {**os.environ, "LD_PRELOAD": str(_library()), "FAKE_CUDA_DEVICES": str(devices)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if own_device is not None:
        environment["FAKE_CUDA_OWN_DEVICE"] = str(own_device)
    return environment


def is_loaded() -> bool:
    """Whether this process was started with it."""
    return NAME in os.environ.get("LD_PRELOAD", "")


def _headers() -> Path | None:
    nvidia = importlib.util.find_spec("nvidia")
    places = nvidia.submodule_search_locations if nvidia is not None else None
    found = [header.parent for place in places or () for header in Path(place).glob("*/include/cuda.h")]
    return found[0] if found else None


def _library() -> Path:
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.c"), *HERE.rglob("*.h")])
    headers = _headers()
    assert headers is not None, missing()
    digest = hashlib.sha256(b"".join([str(headers).encode(), *(source.read_bytes() for source in sources)]))
    directory = BUILT / digest.hexdigest()[:16]
    library = directory / NAME
    if not library.exists():
        directory.mkdir(parents=True, exist_ok=True)
        making = directory / str(os.getpid())
        cpp = [str(source) for source in sources if source.suffix == ".cpp"]
        options = ["-O1", "-fPIC", "-fvisibility=hidden"]
        subprocess.run(["gcc", *options, "-c", str(HERE / "unused.c"), "-o", f"{making}.o"], check=True)
        command = ["g++", "-std=c++17", *options, "-shared", f"-I{HERE}", f"-I{headers}", *cpp, f"{making}.o"]
        subprocess.run([*command, "-o", str(making), f"-Wl,-soname,{NAME}", "-ldl", "-lpthread"], check=True)
        making.rename(library)  # several processes may build at once
    return library


class Fake:
    """The counts of this process's fake, and its settings."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(NAME)
        self._library.fake_count.restype = ctypes.c_long
        self._library.fake_count.argtypes = [ctypes.c_char_p, ctypes.c_int]
        self._library.fake_violations.restype = ctypes.c_long
        self._library.fake_violations.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._library.fake_kernels.argtypes = [ctypes.c_char_p, ctypes.c_long]

    def counts(self, *, here: bool = False) -> dict[str, int]:
        """Everything counted so far, by the process or by the calling thread alone."""
        return {name: self._library.fake_count(name.encode(), int(here)) for name in COUNTERS}

    def during(self, call: Callable[[], Any], *, here: bool = False) -> dict[str, int]:
        """Counts of a call, without the zeros."""
        before = self.counts(here=here)
        call()
        return {name: now - before[name] for name, now in self.counts(here=here).items() if now != before[name]}

    def violations(self) -> list[str]:
        """Calls of this process that no correct program makes."""
        text = ctypes.create_string_buffer(1 << 16)
        self._library.fake_violations(text, len(text))
        return text.value.decode().splitlines()

    def forget_violations(self) -> None:
        """Start anew."""
        self._library.fake_forget_violations()

    def kernels(self) -> list[str]:
        """The mangled names of all kernels launched since the last call, each once."""
        text = ctypes.create_string_buffer(1 << 20)
        self._library.fake_kernels(text, len(text))
        return text.value.decode().splitlines()

    def registered_ranges(self) -> int:
        """How many ranges of host memory are registered."""
        return int(self._library.fake_registered_ranges())

    def has_context(self, device: int) -> bool:
        """Whether this process has a context on a device."""
        return bool(self._library.fake_has_context(device))

    def copies_at(self, bytes_per_second: float) -> None:
        """How fast each stream copies from now on; 0: as fast as the machine. Below 0: nothing is moved at all."""
        self._library.fake_copies_at(ctypes.c_double(bytes_per_second))

    def delays(self, seed: int, longest: float) -> None:
        """Begin each piece of work up to ``longest`` seconds late from now on, drawn from the seed for each stream."""
        self._library.fake_delays(seed, ctypes.c_double(longest))

    def suspend(self, address: int) -> None:
        """Take away the memory behind the allocation of device memory that ``address`` lies in, as sleep mode does."""
        self._library.fake_suspend(ctypes.c_void_p(address), 0)

    def resume(self, address: int) -> None:
        """Bring it back at the same addresses, empty."""
        self._library.fake_suspend(ctypes.c_void_p(address), 1)

    def limits_device_memory(self, size: int) -> None:
        """Refuse to allocate more than ``size`` bytes of device memory from now on; below 0: no limit."""
        self._library.fake_limits_device_memory(ctypes.c_long(size))

    def unregisters_in(self, seconds: float) -> None:
        """How long the driver takes to unregister a range."""
        self._library.fake_unregisters_in(ctypes.c_double(seconds))
