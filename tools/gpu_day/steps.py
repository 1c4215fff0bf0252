"""The steps of the day, in the order of their worth: the machine may be gone after any of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINES = "tests/cuda_vllm/cuda_engines"
FACTS = "nvidia-smi -q; nvidia-smi topo -m; lscpu; cat /proc/meminfo; cat /proc/driver/nvidia/version; ldd --version"


@dataclass(frozen=True)
class Day:
    """Where the day runs, and where its results go."""

    out: Path
    small: bool = False
    """On the fake CUDA: sizes that try the steps and measure nothing."""

    def sizes(self) -> list[str]:
        """The option of the measuring tools."""
        return ["--small"] if self.small else []


@dataclass(frozen=True)
class Step:
    """One process with a time limit."""

    name: str
    limit_s: float
    command: Callable[[Day], Sequence[str]]
    shows_bytes: bool = False
    """Whether it compares bytes or tokens. Its exit status is then 0 if all are right, and 1 if not."""
    report: str = ""
    """File of `gpu_check` in the results, which says whether bytes are wrong: other failures are not."""
    kernels: bool = False
    """Whether the fake's kernels have to be started for it. Tests and engines start their own."""

    def verdict(self, out: Path, status: int | None) -> str:
        """ "right", "wrong", "not shown", or "" for a step that shows no bytes. ``status``: None if it did not end."""
        if not self.shows_bytes:
            return ""
        if self.report:
            try:
                found = json.loads(Path(out, self.report).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return "not shown"
            return "wrong" if found["wrong"] else "right" if found["sections"] else "not shown"
        return {0: "right", 1: "wrong"}.get(status if status is not None else -1, "not shown")


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _tests(day: Day, *tests: str) -> list[str]:
    # Each failure is of interest, and no file is written into the checkout.
    return _python("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", *tests)


def _check(day: Day) -> list[str]:
    return _python("tools/gpu_check", "--json", str(day.out / "check.json"), *day.sizes())


def _engine(day: Day, *more: str) -> list[str]:
    return _python("tools/gpu_day/engine.py", *day.sizes(), *more)


def _bench(*shape: str) -> Callable[[Day], list[str]]:
    layers, block = shape
    small = ("4", "64KiB")

    def command(day: Day) -> list[str]:
        chosen = small if day.small else (layers, block)
        options = ["--device", "cuda", "--layout", "LBHNC", "--layers", chosen[0], "--block-bytes", chosen[1], "--json"]
        return _python("-m", "undercroft.cli.main", "bench", "copy", *options)

    return command


STEPS = (
    Step("facts", 20, lambda day: ["bash", "-c", f"{sys.executable} -m pip list --format=freeze; {FACTS}; true"]),
    Step("gpu_check", 295, _check, shows_bytes=True, report="check.json", kernels=True),
    Step("tests/gpu", 100, lambda day: _tests(day, "tests/gpu"), shows_bytes=True),
    Step(
        "engine: steps, graphs, V1",
        120,
        lambda day: _tests(day, f"{ENGINES}/test_llama.py", f"{ENGINES}/test_schedules.py"),
        shows_bytes=True,
    ),
    Step(
        "engine: sleep, windows, fp8",
        90,
        lambda day: _tests(day, f"{ENGINES}/test_sleep.py", f"{ENGINES}/test_models.py"),
        shows_bytes=True,
    ),
    Step(
        "engine: MLA, EAGLE, MTP",
        90,
        lambda day: _tests(day, f"{ENGINES}/test_mla.py", f"{ENGINES}/test_drafts.py"),
        shows_bytes=True,
    ),
    Step("8B shape", 150, lambda day: _engine(day, "--json", str(day.out / "engine.json"))),
    Step("copies of 70B, a rank of 8", 40, _bench("80", "640KiB"), kernels=True),
    Step("copies of MLA", 40, _bench("61", "4392KiB"), kernels=True),
    Step(
        "8B shape, gathered",
        120,
        # To compute the longest prompt takes half of the limit, and its figure is in the other step.
        lambda day: _engine(
            day, "--gather-below", "128KiB", "--longest", "32768", "--json", str(day.out / "engine-gathered.json")
        ),
    ),
)
