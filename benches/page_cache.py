"""The page cache of the kernel, which benchmarks of disks leave out."""

from __future__ import annotations

import os
from pathlib import Path


def forget_pages(directory: Path) -> None:
    """Write the directory's files out, and drop them from the page cache."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
