"""Compares the speed of this checkout with that of another commit: `make compare BASE=commit`.

Both versions are built, each with a virtual environment and a build directory of its own, and run the same benchmarks
in turn (base, new, new, base, ...), so that a machine that grows slower meanwhile slows both. For every figure the
table gives the medians, and the ratio new/base of each pair of neighbours: smallest, median, largest. The checkout of
the base stays in .run/compare for the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".run/compare"
BENCHES = {
    "lookup": ("lookup", "--keys", "8192", "--rounds", "50000"),
    "lookup-served": ("lookup", "--mode", "served", "--keys", "2048", "--clients", "1", "--rounds", "20000"),
    "pending": ("lookup", "--pending", "1000"),
    "disk": ("disk", "--path", "{disk}"),
    "disk-512k": ("disk", "--path", "{disk}", "--block-bytes", "512KiB", "--blocks", "1024"),
    "disk-128k": ("disk", "--path", "{disk}", "--block-bytes", "128KiB", "--blocks", "4096"),
    "copy": ("copy",),
    "open": ("recover", "--path", "{disk}", "--blocks", "500000"),
    "replay": ("replay", "--trace", "{trace}", "--host-blocks", "2000", "--disk-blocks", "8000"),
}
"""Name -> arguments of ``undercroft bench``, which both versions must understand."""
PROGRAMS = {
    "hooks": ("{python}", "{root}/benches/hooks.py", "--json"),
    "entries": ("cargo", "bench", "--quiet", "--package", "undercroft-bench", "--bench", "entries", "--", "1"),
}
"""Name -> command of a benchmark that is no `undercroft bench`. A program in Python is this checkout's, for both
versions; a benchmark of cargo is each version's own."""
TRACE = "rust/bench/tests/data/conversation_1000.jsonl"
TIMEOUT_S = 600
# Fewer rounds agree too often by chance.
SURE_ROUNDS = 5
# Set by a caller for its own build; each version here has its own.
NOT_INHERITED = ("VIRTUAL_ENV", "CARGO_TARGET_DIR", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH")


class CompareError(Exception):
    """The comparison cannot be made; the message names the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one benchmark."""

    figure: str
    base: float
    """Median over the rounds."""
    new: float
    ratios: tuple[float, ...]
    """new/base of each round; empty if a base is 0."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of all rounds of one benchmark."""

    rows: list[Row]
    equal: dict[str, float]
    """Whole numbers that were the same in every run: settings, counts."""
    only_base: list[str]
    only_new: list[str]


def figures(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a benchmark's JSON object, with names such as ``cases[1].gib_per_s``."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from figures(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from figures(below, f"{name}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def compare(base: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the results of as many rounds of each version."""
    if not base or len(base) != len(new):
        raise ValueError(f"{len(base)} results of the base and {len(new)} of the new version are no pairs")
    sides = [[dict(figures(result)) for result in results] for results in (base, new)]
    common = [set.intersection(*map(set, side)) for side in sides]
    rows: list[Row] = []
    equal: dict[str, float] = {}
    for name in [one for one in sides[1][0] if one in common[0] and one in common[1]]:
        olds, news = ([result[name] for result in side] for side in sides)
        if isinstance(olds[0], int) and len({*olds, *news}) == 1:
            equal[name] = olds[0]
            continue
        ratios = tuple(b / a for a, b in zip(olds, news, strict=True)) if all(olds) else ()
        rows.append(Row(name, statistics.median(olds), statistics.median(news), ratios))
    return Comparison(rows, equal, sorted(common[0] - common[1]), sorted(common[1] - common[0]))


def table(comparison: Comparison) -> list[str]:
    """Lines for people."""
    cells = [("figure", "base", "new", "new/base: min", "median", "max", "")]
    for row in comparison.rows:
        spread = ("-", "-", "-", "")
        if row.ratios:
            low, high = min(row.ratios), max(row.ratios)
            side = "every round higher" if low > 1 else "every round lower" if high < 1 else ""
            if len(row.ratios) < SURE_ROUNDS:
                side = ""
            spread = (f"{low:.3f}", f"{statistics.median(row.ratios):.3f}", f"{high:.3f}", side)
        cells.append((row.figure, f"{row.base:.5g}", f"{row.new:.5g}", *spread))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = []
    for line in cells:
        first, *rest = (
            cell.ljust(width) if column in (0, 6) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join((first, *rest)).rstrip())
    if comparison.equal:
        lines.append("equal: " + ", ".join(f"{name} {value}" for name, value in comparison.equal.items()))
    for side, names in (("base", comparison.only_base), ("new", comparison.only_new)):
        if names:
            lines.append(f"only in {side}: {', '.join(names)}")
    return lines


def machine() -> str:
    """Processor, cores, memory and kernel."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, load {load:.1f} at the start"
    )


def git(*arguments: str) -> str:
    """The output of a git command in this checkout."""
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise CompareError(f"git {shlex.join(arguments)} failed: {result.stderr.strip()}")
    return result.stdout.strip()


def resolve(name: str) -> str:
    """The commit of that name."""
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except CompareError:
        known = git("log", "-3", "--format=%h %s").replace("\n", "; ")
        raise CompareError(
            f"BASE={name} is no commit of this repository. Give a hash, branch or tag, such as one of: {known}"
        ) from None


def check_out(commit: str) -> Path:
    """A checkout of the commit below `WORK`: that of the last time, brought to the commit, or a new one."""
    tree = WORK / "base"
    git("worktree", "prune")
    if (tree / ".git").exists():
        git("-C", str(tree), "checkout", "--quiet", "--force", "--detach", commit)
    else:
        tree.parent.mkdir(parents=True, exist_ok=True)
        git("worktree", "add", "--quiet", "--force", "--detach", str(tree), commit)
    return tree


def environment() -> dict[str, str]:
    """The caller's environment, without the variables of its own build."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def build(tree: Path, names: Sequence[str]) -> None:
    """``make build`` there, and the benchmarks of cargo among ``names``."""
    print(f"build: {tree}", file=sys.stderr, flush=True)
    cargo = [PROGRAMS[name] for name in names if PROGRAMS.get(name, ())[:1] == ("cargo",)]
    for command in (("make", "build"), *((*one[: one.index("--")], "--no-run") for one in cargo)):
        result = subprocess.run(command, cwd=tree, env=environment(), stdout=sys.stderr, check=False)
        if result.returncode:
            raise CompareError(f"{shlex.join(command)} in {tree} ended with {result.returncode}; its output is above")


def command_of(tree: Path, name: str) -> list[str]:
    """The command that runs a benchmark with the version in ``tree``."""
    places = {
        "disk": str(WORK / "disk"),
        "trace": str(ROOT / TRACE),
        "root": str(ROOT),
        "python": str(tree / ".venv/bin/python"),
    }
    parts = PROGRAMS.get(name) or (str(tree / ".venv/bin/undercroft"), "bench", *BENCHES[name], "--json")
    return [part.format(**places) for part in parts]


def result_of(output: str) -> dict[str, Any]:
    """The JSON object in a benchmark's output, or the figures of `cargo bench --bench entries`."""
    entries = re.findall(r"^ +(\S.*?) +\d+ entries: median +([\d.]+) us.*insertion +([\d.]+)$", output, re.MULTILINE)
    if entries:
        return {name: {"median_us": float(median), "longest_scaled_us": float(most)} for name, median, most in entries}
    # vLLM's log lines, which may be in the output too, have braces as well, but do not begin with one.
    begin = re.search(r"^\{", output, re.MULTILINE)
    if begin is None:
        raise CompareError(f"a benchmark printed no JSON object: {output.strip()[-500:]}")
    result, _ = json.JSONDecoder().raw_decode(output, begin.start())
    return result


def run(tree: Path, name: str) -> dict[str, Any]:
    """One run of a benchmark by the version in ``tree``."""
    (WORK / "disk").mkdir(parents=True, exist_ok=True)
    command = command_of(tree, name)
    try:
        result = subprocess.run(
            command, cwd=tree, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CompareError(f"{shlex.join(command)} took more than {TIMEOUT_S} s") from None
    if result.returncode:
        raise CompareError(f"{shlex.join(command)} ended with {result.returncode}: {result.stderr.strip()}")
    return result_of(result.stdout)


def measure(base: Path, names: Sequence[str], rounds: int) -> Iterator[tuple[str, Comparison]]:
    """Run the benchmarks of both versions in turn."""
    for name in names:
        results: dict[Path, list[dict[str, Any]]] = {base: [], ROOT: []}
        for number in range(1, rounds + 1):
            # Each version is first in every second round: heat and dirty pages of the other version even out.
            for tree, title in ((base, "base"), (ROOT, "new"))[:: 1 if number % 2 else -1]:
                print(f"{name}: round {number} of {rounds}, {title}", file=sys.stderr, flush=True)
                results[tree].append(run(tree, name))
        yield name, compare(results[base], results[ROOT])


def _rounds(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number of rounds; allowed: 1 and more")
    return int(value)


def _benches(value: str) -> list[str]:
    names = value.split() or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES | PROGRAMS]:
        allowed = " ".join(BENCHES | PROGRAMS)
        raise argparse.ArgumentTypeError(f"{' '.join(unknown)}: no such benchmark; allowed: {allowed}")
    return names


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("base", metavar="BASE", help="commit to compare with: hash, branch or tag")
    made.add_argument("--rounds", type=_rounds, default=5, metavar="N", help="runs of each version (%(default)s)")
    made.add_argument(
        "--benches",
        type=_benches,
        default=list(BENCHES),
        metavar="NAMES",
        help=f"of: {' '.join(BENCHES | PROGRAMS)} (default: all but the last two)",
    )
    return made


def main() -> int:
    """Build, measure, print."""
    args = parser().parse_args()
    try:
        commit = resolve(args.base)
        changed = " with uncommitted changes" if git("status", "--porcelain") else ""
        base = check_out(commit)
        for tree in (ROOT, base):
            build(tree, args.benches)
        print(f"machine: {machine()}")
        print(f"base: {git('log', '-1', '--format=%h %s', commit)}")
        print(f"new: {git('log', '-1', '--format=%h %s')}{changed}")
        for name, comparison in measure(base, args.benches, args.rounds):
            command = shlex.join(PROGRAMS.get(name) or ("undercroft", "bench", *BENCHES[name]))
            print(f"\n{name} ({command}), {args.rounds} rounds")
            print("\n".join(table(comparison)), flush=True)
    except CompareError as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
