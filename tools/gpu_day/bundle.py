"""Builds the bundle: everything that a machine with PyTorch and a GPU lacks to run vLLM with undercroft, as one file.

    tools/gpu_day/bundle.py --python 3.12 --target .run/gpu-bundle.zip

Of vLLM's CUDA wheel it has the Python files and the allocator of sleep mode; `stand_ins.py` replaces the extension.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

import cuda_wheels  # noqa: E402  # the line above makes it importable
import overlay  # noqa: E402

CARRIED = 64 << 20
"""Most bytes that travel to a rented machine: the bundle and the files of the checkout."""
NO_KERNELS = "if not (FA2_AVAILABLE or FA3_AVAILABLE):"
"""Where vLLM refuses to be imported without the kernels of FlashAttention, which no step calls."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the machine's Python (%(default)s)")
    parser.add_argument("--target", type=Path, default=ROOT / ".run/gpu-bundle.zip", help="file (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch, "site")
        add_vllm(site)
        add_packages(site, options.python)
        add_undercroft(site)
        write(site, options.target)
    bundle, checkout = options.target.stat().st_size, checkout_bytes()
    print(f"{options.target}: {bundle / (1 << 20):.1f} MiB; files of the checkout: {checkout / (1 << 20):.1f} MiB")
    if bundle + checkout > CARRIED:
        print(f"error: together more than the {CARRIED >> 20} MiB that a machine takes", file=sys.stderr)
        return 1
    return 0


def add_vllm(site: Path) -> None:
    """The Python files of the CUDA wheel, with stand-ins for its extensions."""
    large = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so", "__pycache__")
    shutil.copytree(cuda_wheels.unpacked(overlay.installed_version()), site, ignore=shutil.ignore_patterns(*large))
    package = site / "vllm"
    shutil.copy(HERE / "stand_ins.py", package / "_C_stable_libtorch.py")
    (package / "_moe_C_stable_libtorch.py").touch()
    attention = package / "vllm_flash_attn/__init__.py"
    text = attention.read_text(encoding="utf-8")
    if text.count(NO_KERNELS) != 1:
        raise ValueError(f"{attention.name} of this vLLM does not say once: {NO_KERNELS}")
    attention.write_text(text.replace(NO_KERNELS, "if False:"), encoding="utf-8")


def add_packages(site: Path, python: str) -> None:
    """The packages of `packages.txt` for the machine's Python. Raises CalledProcessError."""
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    platform = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_34", "--only-binary", ":all:"]
    subprocess.run([*uv, *platform, "-r", str(HERE / "packages.txt")], check=True)
    shutil.rmtree(site / "bin", ignore_errors=True)


def add_undercroft(site: Path) -> None:
    """undercroft and its benchmarks as this environment has them: their core runs with every Python from 3.11 on."""
    for name, source in (
        ("undercroft", ROOT / "python/undercroft"),
        ("undercroft-bench", ROOT / "rust/pyo3-bench/python/undercroft_bench"),
    ):
        shutil.copytree(source, site / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in metadata.files(name) or ():
            if file.parent.name.endswith(".dist-info"):
                target = site / file
                target.parent.mkdir(exist_ok=True)
                shutil.copy(file.locate(), target)


def write(site: Path, target: Path) -> None:
    """Pack a folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(site.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(site))


def unpack(bundle: Path, site: Path) -> None:
    """Make the folder to put on PYTHONPATH, unless it is newer than the bundle."""
    if site.exists() and site.stat().st_mtime >= bundle.stat().st_mtime:
        return
    shutil.rmtree(site, ignore_errors=True)
    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(site)


def checkout_bytes() -> int:
    """Bytes of the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return sum(path.lstat().st_size for name in filter(None, listed.split("\0")) if (path := ROOT / name).exists())


if __name__ == "__main__":
    sys.exit(main())
