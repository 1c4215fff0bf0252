"""A vLLM of another version for tests on the CPU: its Python files over the installed vLLM's compiled extension.

No CPU wheel of that version is needed. It proves how the connector's contract changes from one version to the next, not
how that version performs. Prints the folder to put first on PYTHONPATH; made once, kept under ~/.cache/undercroft.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

MISSING = ("orjson",)
"""Packages that the servers of later versions import and the installed vLLM does not bring."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("version", help="such as 0.33.0")
    version = parser.parse_args().version
    print(kept(f"vllm-{version}-on-{installed_version()}", lambda scratch: make(version, scratch)))
    return 0


def cache_root() -> Path:
    """Where overlays are kept, outside the checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "undercroft"


def installed_version() -> str:
    """Version of the vLLM whose compiled extension is used."""
    namespace: dict[str, object] = {}
    exec((installed_package() / "_version.py").read_text(encoding="utf-8"), namespace)
    return str(namespace["__version__"]).partition("+")[0]


def installed_package() -> Path:
    """Folder of the installed vLLM, whatever PYTHONPATH puts before it."""
    finder = importlib.util.find_spec("torch")
    if finder is None or finder.origin is None:
        sys.exit("error: no torch in this environment: run `make build` first")
    package = Path(finder.origin).parents[1] / "vllm"
    if not package.is_dir():
        sys.exit(f"error: no vLLM beside torch in {package.parent}: run `make build` first")
    return package


def download(version: str, target: Path, purpose: str) -> Path:
    """The wheel of a vLLM for CUDA, put into a folder."""
    print(f"Downloading the wheel of vllm {version} (about 340 MB), for {purpose}", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--retries",
        "2",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    subprocess.run([*command, "--dest", str(target), f"vllm=={version}"], check=True)
    [wheel] = target.glob("*.whl")
    return wheel


def kept(name: str, make: Callable[[Path], Path]) -> Path:
    """The folder ``name`` in `cache_root`. At the first call ``make`` makes it: it gets an empty folder on the same
    filesystem, and returns the folder in it that is kept. Raises whatever ``make`` raises."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    target = root / name
    with Path(root, f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                make(Path(scratch)).rename(target)
    return target


def make(version: str, scratch: Path) -> Path:
    """Put the overlay together in a scratch folder."""
    new = scratch / "overlay"
    wheel = download(version, scratch / "wheel", "its Python files")
    shutil.copytree(
        installed_package(), new / "vllm", ignore=shutil.ignore_patterns("*.py", "__pycache__"), symlinks=True
    )
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        archive.extractall(new, members)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(new)]
    subprocess.run([*command, *MISSING], check=True)
    return new


if __name__ == "__main__":
    sys.exit(main())
