"""SGLang, to be imported by tests without its server: its wheel and the few packages that its cache imports.

Prints the folder to put on PYTHONPATH. The wheels (40 MB) are fetched once and kept under ~/.cache/undercroft.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
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
    root = overlay.cache_root()
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"sglang-{VERSION}"
    with Path(root, f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            print(f"Downloading SGLang {VERSION} (40 MB), for its tests", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                new = Path(scratch, "new")
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "2", "--no-deps"]
                command += ["--only-binary", ":all:", "--target", str(new)]
                subprocess.run([*command, *PACKAGES], check=True)
                new.rename(target)
    return target


if __name__ == "__main__":
    sys.exit(main())
