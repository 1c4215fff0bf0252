"""The compiled extension of vLLM's CUDA wheels, to be loaded over the fake CUDA of the tests.

Prints the files, one a line; each is fetched once and kept under ~/.cache/undercroft (90 MB), the wheel is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

import overlay

EXTENSION = "vllm/_C_stable_libtorch.abi3.so"
"""Where `swap_blocks_batch` is."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("versions", nargs="+", help="such as 0.33.0")
    for version in parser.parse_args().versions:
        print(library(version))
    return 0


def library(version: str) -> Path:
    """The extension of a version."""
    target = overlay.cache_root() / "cuda-extensions" / version / Path(EXTENSION).name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            wheel = overlay.download(version, Path(scratch), "its compiled extension")
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract(EXTENSION, scratch))
            extracted.rename(target)
    return target


if __name__ == "__main__":
    sys.exit(main())
