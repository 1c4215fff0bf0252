"""A block cgroup of this process's own, which limits how fast it reads from the device of a directory. Needs root."""

from __future__ import annotations

import os
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/blkio")
_V2 = Path("/sys/fs/cgroup")


class BlockCgroup:
    """The cgroup, of version 1 or 2. This process, with all its threads, belongs to it until it is closed."""

    def __init__(self, directory: Path) -> None:
        device = directory.stat().st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"
        self._is_first = (_V1 / "blkio.throttle.read_bps_device").exists()
        self._parent = _V1 if self._is_first else _V2
        self._path = self._parent / f"undercroft-bench-{os.getpid()}"
        self._path.mkdir()
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, bytes_per_s: float | None) -> None:
        """Let the device be read at this rate, or at its own."""
        if self._is_first:
            # 0 removes the limit.
            value = f"{self._device} {0 if bytes_per_s is None else max(1, int(bytes_per_s))}"
            (self._path / "blkio.throttle.read_bps_device").write_text(value)
        else:
            value = "max" if bytes_per_s is None else str(max(1, int(bytes_per_s)))
            (self._path / "io.max").write_text(f"{self._device} rbps={value}")

    def close(self) -> None:
        """Leave the cgroup and remove it."""
        (self._parent / "cgroup.procs").write_text(str(os.getpid()))
        self._path.rmdir()
