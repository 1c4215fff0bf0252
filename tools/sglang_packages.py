"""SGLang, to be imported by tests without its server: its wheel and the few packages that its cache imports.

Prints the folder to put on PYTHONPATH. The wheels (40 MB) are fetched once and kept under ~/.cache/undercroft.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import overlay

VERSION = "0.5.23"
PACKAGES = (
    f"sglang=={VERSION}",
    "orjson==3.13.0",
    "pybase64==1.5.1",
    "ipython==9.18.1",
    "traitlets==5.16.1",
    "gguf==0.19.0",
)
"""SGLang's kernels and most of its other requirements are for a GPU, or come with vLLM."""


def main() -> int:
    """Command line."""
    print(unpacked())
    return 0


def unpacked() -> Path:
    """The folder to put first on PYTHONPATH.

    Fetches the packages at the first call. Raises CalledProcessError if pip cannot fetch them, and OSError.
    """
    return overlay.kept(f"sglang-{VERSION}", _install)


def _install(scratch: Path) -> Path:
    print(f"Downloading SGLang {VERSION} (40 MB), for its tests", file=sys.stderr)
    new = scratch / "new"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "2", "--no-deps"]
    subprocess.run([*command, "--only-binary", ":all:", "--target", str(new), *PACKAGES], check=True)
    return new


if __name__ == "__main__":
    sys.exit(main())
