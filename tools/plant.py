"""Plants each fault of a list, one at a time, in a copy of the sources, and runs the test that has to fail.

    tools/plant.py                 all faults of tests/cuda_vllm/planted.toml
    tools/plant.py "row numbers"   those with these words in their name

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
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests/cuda_vllm/planted.toml"


class Fault(NamedTuple):
    """A fault and the test that finds it."""

    name: str
    file: str
    """The source, from `python/undercroft` on."""
    old: str
    """Text that the source has once."""
    new: str
    test: str
    """As pytest takes it."""


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
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(
            ROOT / "python/undercroft", Path(scratch, "undercroft"), ignore=shutil.ignore_patterns("__pycache__")
        )
        file = Path(scratch, "undercroft", fault.file)
        text = file.read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            raise ValueError(f"{fault.name}: {fault.file} has {text.count(fault.old)} times, not once: {fault.old!r}")
        file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", fault.test]
        ran = subprocess.run(command, cwd=ROOT, env=environment(fault.test, Path(scratch)), capture_output=True)
    # 1: a test failed; below 0: the fault has ended the process; anything else means that none ran.
    if ran.returncode > 1:
        raise ValueError(f"{fault.name}: pytest ended with {ran.returncode}: {ran.stdout[-2000:].decode()}")
    return ran.returncode != 0


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
