"""`python tools/gpu_day`: every step on this machine's GPU, or on the fake CUDA with `--dry-run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/fake_cuda", "tests/cuda_vllm", "tests/vllm", "tests/unit")
sys.path[:0] = [str(ROOT / "tools"), *(str(ROOT / name) for name in TESTS)]

from gpu_day.bundle import unpack  # noqa: E402  # the lines above make it importable
from gpu_day.runner import run  # noqa: E402
from gpu_day.steps import STEPS, Day  # noqa: E402

TOTAL_S = 590.0
"""A rented machine runs one command for ten minutes at most."""


def main() -> int:
    """Exit code: see `runner.run`."""
    parser = argparse.ArgumentParser(prog="gpu_day", description=__doc__)
    parser.add_argument("--bundle", type=Path, default=ROOT / ".run/gpu-bundle.zip", help="file (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / ".run/gpu-day", help="folder for results (%(default)s)")
    parser.add_argument("--steps", default="", help="names, separated by |; a part of a name is enough (all)")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds of all steps (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the fake CUDA: tries the command")
    options = parser.parse_args()
    chosen = [step for step in STEPS if any(part in step.name for part in options.steps.split("|"))]
    if not chosen:
        parser.error(f"--steps: no step is called so; there are: {', '.join(step.name for step in STEPS)}")
    if not options.bundle.exists():
        print(f"error: there is no {options.bundle}: run `make gpu-bundle` first", file=sys.stderr)
        return 2
    site = ROOT / ".run/gpu-site"
    unpack(options.bundle, site)
    day = Day(options.out.resolve(), options.dry_run)
    code = run(day, chosen, environments(site, fake=options.dry_run), options.total)
    print(f"Results: {day.out}")
    return code


def environments(site: Path, *, fake: bool) -> dict[bool, Mapping[str, str]]:
    """The environments of steps, by whether they need the fake's kernels started."""
    import fake_cuda
    import fake_device

    made = fake_device.environment(site, devices=2) if fake else {**os.environ, **fake_device.on_gpu(site)}
    folders = ["tools", *TESTS]
    base = os.pathsep.join([str(site), *(str(ROOT / folder) for folder in folders)])
    plain = made | {"PYTHONPATH": base, "PYTHONUNBUFFERED": "1"}
    with_kernels = plain | {"PYTHONPATH": os.pathsep.join([str(fake_cuda.HERE / "computing"), base])}
    return {False: plain, True: with_kernels if fake else plain}


if __name__ == "__main__":
    sys.exit(main())
