"""Control groups with a memory limit, below the test's own group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class MemoryGroup:
    """A group of this machine's kernel, of version 1 or 2."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._is_first = (directory / "memory.limit_in_bytes").exists()

    def limit(self, size: int) -> None:
        """Set the limit in bytes."""
        (self.directory / ("memory.limit_in_bytes" if self._is_first else "memory.max")).write_text(str(size))

    def join(self) -> None:
        """Move this process into the group; for ``preexec_fn``."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that are charged to the group."""
        stat = dict(line.split() for line in (self.directory / "memory.stat").read_text().splitlines())
        return int(stat["shmem"])


@contextmanager
def nested(*names: str) -> Iterator[list[MemoryGroup]]:
    """Groups, each within the one before. Skips the test where no group can be made: without root, for example."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    first = next((path for controllers, path in own.items() if "memory" in controllers.split(",")), None)
    parent = Path(f"/sys/fs/cgroup/memory{first}") if first is not None else Path("/sys/fs/cgroup")
    made: list[MemoryGroup] = []
    try:
        for name in names:
            try:
                if first is None:
                    # A group of version 2 that has processes can have no groups with controllers, but for the root.
                    (parent / "cgroup.subtree_control").write_text("+memory")
                parent = parent / name
                parent.mkdir()
            except OSError as error:
                pytest.skip(f"no control group can be made here: {error}")
            made.append(MemoryGroup(parent))
        yield made
    finally:
        for group in reversed(made):
            group.directory.rmdir()
