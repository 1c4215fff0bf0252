"""vLLM's CUDA wheels, to be loaded over the fake CUDA of the tests.

Prints the compiled extension of each version, one a line. Of a wheel (340 MB) its Python files and the extensions for
operators and for sleep mode's memory are kept under ~/.cache/undercroft (175 MB): no kernel of attention.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

import overlay

EXTENSION = "vllm/_C_stable_libtorch.abi3.so"
"""Where `swap_blocks_batch` is."""
EXTENSIONS = (EXTENSION, "vllm/_moe_C_stable_libtorch.abi3.so", "vllm/cumem_allocator.abi3.so")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("versions", nargs="+", help="such as 0.33.0")
    for version in parser.parse_args().versions:
        print(unpacked(version) / EXTENSION)
    return 0


def unpacked(version: str) -> Path:
    """The folder to put first on PYTHONPATH for the vLLM of a version.

    Fetches the wheel at the first call. Raises CalledProcessError if pip cannot fetch it, and OSError.
    """
    return overlay.kept(f"vllm-cuda-{version}", lambda scratch: _unpack(version, scratch))


def _unpack(version: str, scratch: Path) -> Path:
    wheel = overlay.download(version, scratch / "wheel", "tests on the fake CUDA")
    new = scratch / "new"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(new, filter(_is_kept, archive.namelist()))
    return new


def _is_kept(name: str) -> bool:
    return name.endswith((".py", ".json")) or name in EXTENSIONS or ".dist-info/" in name


if __name__ == "__main__":
    sys.exit(main())
