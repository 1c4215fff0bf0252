"""The command line of the check."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # PyTorch and undercroft may be missing, which `why_not` says.
    from gpu_check.report import Row, Section
    from gpu_check.rig import Rig


def main(arguments: Sequence[str] | None = None) -> int:
    """0: right. 1: something is wrong, or could not be measured. 2: this machine has nothing to check."""
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="The first minutes of undercroft on a GPU: bytes first, then speed, then what copies cost the "
        "model. Needs PyTorch and undercroft only, and takes less than five minutes.",
    )
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="file for the results (%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the check, measures nothing of use")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the check without a GPU")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    parser.add_argument("--session", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (missing := why_not(options.device)) is not None:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    if options.rank is not None:
        from gpu_check.ranks import be_rank

        return be_rank(options.rank, options.socket, options.session, options.device, small=options.small)
    return check(options.device, options.small, options.json)


def why_not(kind: str) -> str | None:
    """Why nothing can be checked here, with the remedy; None if it can."""
    try:
        import torch

        import undercroft._core  # noqa: F401  # whether it can be loaded
    except ImportError as error:
        return f"{error}. Install PyTorch (a CUDA build) and undercroft's wheel into this Python, {sys.executable}."
    if kind == "cpu":
        return None
    if torch.version.hip is not None:
        return "this is PyTorch for AMD GPUs (ROCm), which undercroft does not support."
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} has no CUDA. Install a CUDA build of PyTorch."
    if not torch.cuda.is_available():
        return (
            f"PyTorch {torch.__version__} finds no NVIDIA GPU. Run on a machine with one and its driver (nvidia-smi "
            "shows it), and in a container with --gpus all."
        )
    return None


def check(kind: str, small: bool, target: Path) -> int:
    """Run every part, print a table, write the JSON."""
    import torch

    from gpu_check import borders, correctness, interference, ranks, speed
    from gpu_check.facts import facts
    from gpu_check.report import Section, as_json, as_table, exit_code
    from gpu_check.rig import TOTAL_S, Rig

    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    rig = Rig(device, small)
    known = facts(device)
    target.parent.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[str, Callable[[Rig], list[Row]]]] = [
        ("correctness", correctness.check),
        ("bytes in a large cache", borders.far),
        ("speed", speed.check),
        ("copies beside a prefill", borders.beside_prefill),
        ("copies beside Python", borders.beside_python),
        ("many batches", borders.batches),
        ("border of gathering", borders.sweep),
        ("decode beside copies", interference.decode),
        ("launches beside pinning", interference.pinning),
        ("launches beside unpinned copies", interference.unpinned),
        ("chunks of registration", borders.chunks),
        ("two ranks", ranks.check),
    ]
    sections: list[Section] = []
    for name, part in parts:
        skipped = ""
        if rig.is_over():
            skipped = f"{TOTAL_S:g} s are over"
        elif part is ranks.check and kind == "cuda" and torch.cuda.device_count() < ranks.RANKS:
            skipped = "there is one device"
        sections.append(Section(name, 0.0, skipped=skipped) if skipped else run_part(rig, name, part))
        # After each part: a driver that hangs in the next one ends the process.
        result = as_json(known, sections) | {"complete": len(sections) == len(parts)}
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(as_table(known, sections))
    counts = {"wrong": "wrong", "not measured": "errors", "goals missed": "goals_missed"}
    print("\n" + ", ".join(f"{len(result[field])} {word}" for word, field in counts.items()))
    print(f"Results as JSON: {target}")
    return exit_code(sections)


def run_part(rig: Rig, name: str, part: Callable[[Rig], list[Row]]) -> Section:
    """A part's findings; an error ends the part and not the check."""
    from gpu_check.report import Section

    begin = time.monotonic()
    try:
        rows, error = part(rig), ""
    except Exception as raised:
        rows, error = [], f"{type(raised).__name__}: {raised}"
    return Section(name, round(time.monotonic() - begin, 1), rows, error)
