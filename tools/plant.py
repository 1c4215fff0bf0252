"""Plants each fault of a list, one at a time, in a copy of the sources, and runs the test that has to fail.

    tools/plant.py                 all faults of tests/cuda_vllm/planted.toml
    tools/plant.py "staging"       those with these words in their name

Prints a line for each fault. Exits with 1 if a test did not fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests/cuda_vllm/planted.toml"


class Fault(NamedTuple):
    """A fault and the test that finds it."""

    name: str
    file: str
    """The source, from `python/undercroft` on, or from the root for those of the core."""
    old: str
    """Text that the source has once."""
    new: str
    test: str
    """As pytest takes it; a Rust test likewise, by its file and its name."""

    @property
    def is_rust(self) -> bool:
        """Whether it is a fault of the core."""
        return self.file.startswith("rust/")

    @property
    def source(self) -> str:
        """The source, from the root on."""
        return self.file if self.is_rust else f"python/undercroft/{self.file}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="?", default="", help="plant only the faults with these words in their name")
    words = parser.parse_args().words
    survived = 0
    for fault in faults():
        if words in fault.name:
            is_found = finds(fault)
            survived += not is_found
            print(f"{'found   ' if is_found else 'SURVIVED'} {fault.name} ({fault.test})", flush=True)
    return int(survived > 0)


def faults() -> list[Fault]:
    """The list."""
    return [Fault(**fault) for fault in tomllib.loads(LIST.read_text(encoding="utf-8"))["fault"]]


def finds(fault: Fault) -> bool:
    """Whether the test fails with the fault. Raises ValueError if the fault cannot be planted."""
    if fault.is_rust:
        return finds_rust(fault)
    with tempfile.TemporaryDirectory() as scratch:
        plant(fault, Path(scratch), "python/undercroft")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", fault.test]
        sources = Path(scratch, "python")
        ran = subprocess.run(command, cwd=ROOT, env=environment(fault.test, sources), capture_output=True)
    # 1: a test failed; below 0: the fault has ended the process; anything else means that none ran.
    if ran.returncode > 1:
        raise ValueError(f"{fault.name}: pytest ended with {ran.returncode}: {ran.stdout[-2000:].decode()}")
    return ran.returncode != 0


def finds_rust(fault: Fault) -> bool:
    """The same for a fault of the core, which is compiled."""
    file, _, name = fault.test.partition("::")
    _, crate, _, *modules = Path(file).with_suffix("").parts
    # One folder for all faults: cargo takes the same sources in another folder for other crates.
    scratch = ROOT / ".run/plant"
    shutil.rmtree(scratch, ignore_errors=True)
    plant(fault, scratch, "rust", "Cargo.toml", "Cargo.lock")
    environment = {"CARGO_TARGET_DIR": str(ROOT / "target"), **os.environ}
    command = ["cargo", "test", "--quiet", "--package", f"undercroft-{crate}", "--lib"]
    subprocess.run([*command, "--no-run"], cwd=scratch, env=environment, check=True)
    command += ["::".join([*modules, name]), "--", "--exact"]
    ran = subprocess.run(command, cwd=scratch, env=environment, capture_output=True)
    if b"\nrunning 1 test\n" not in ran.stdout:
        raise ValueError(f"{fault.name}: no single test ran: {ran.stdout[-2000:].decode()}")
    return ran.returncode != 0


def plant(fault: Fault, scratch: Path, *copied: str) -> None:
    """Copy sources from the root, and plant the fault in the copy."""
    for one in copied:
        copy = partial(shutil.copytree, ignore=shutil.ignore_patterns("__pycache__"))
        (copy if (ROOT / one).is_dir() else shutil.copy2)(ROOT / one, scratch / one)
    file = scratch / fault.source
    text = file.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {text.count(fault.old)} times, not once: {fault.old!r}")
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def environment(test: str, sources: Path) -> dict[str, str]:
    """The environment of a test: the planted sources first, and the fake CUDA where the test needs it."""
    sys.path[:0] = [str(ROOT / "tests" / name) for name in ("fake_cuda", "cuda_vllm")]
    import cuda_wheels
    import overlay

    import fake_cuda
    import fake_device

    if "cuda_engines" in test:
        made = fake_device.environment(cuda_wheels.unpacked(overlay.installed_version()))
    elif "tests/gpu" in test:
        made = fake_cuda.environment()
    else:
        made = dict(os.environ)
    made["PYTHONPATH"] = os.pathsep.join([str(sources), *filter(None, [made.get("PYTHONPATH")])])
    return made


if __name__ == "__main__":
    sys.exit(main())
