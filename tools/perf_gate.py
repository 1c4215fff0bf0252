"""Fails if this checkout is slower than the version of the baseline: `make perf-gate`.

The baseline is a commit that `benches/baseline.json` names. Both versions are built as by `make compare`, and run the
benchmarks of `ROWS` in turn. A figure fails if it is worse by more than 5 % in every round, that is, by more than 5 %
beyond the spread of the rounds. `make perf-gate RECORD=1` also writes the figures of a gate that has passed to
`benches/RESULTS.md`, and the commit and the digests of the measured code to `benches/baseline.json`.
`tests/unit/test_perf_gate.py` fails if much of that code has changed since.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import ROOT, CompareError, Row, build, check_out, git, machine, measure, resolve

BASELINE = ROOT / "benches/baseline.json"
RESULTS = ROOT / "benches/RESULTS.md"
BEGIN, END = "<!-- perf-gate: begin -->", "<!-- perf-gate: end -->"
WORSE = 1.05
"""A figure may be so many times as bad as the baseline's."""
ROUNDS = 5
LONGEST_S = 15 * 60
"""The benchmarks of all rounds end within this time on an idle machine; builds come before."""
CHANGED_MOST = 0.5
"""Share of a row's files whose code may have changed since the figures."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the gate."""

    bench: str
    """Name in `compare.BENCHES` or `compare.PROGRAMS`."""
    lower: tuple[str, ...]
    """Figures that are better if they are lower."""
    higher: tuple[str, ...]
    """Figures that are better if they are higher."""
    code: tuple[str, ...]
    """The code that the row measures: directories and files."""


INDEX = ("rust/engine/src",)
DISK = (
    "rust/io/src",
    "rust/engine/src/disk",
    "rust/engine/src/writeback",
    "rust/engine/src/promotions",
    "rust/engine/src/checksums.rs",
    "rust/engine/src/verbs/io.rs",
    "rust/contract/src/checksum.rs",
    "rust/driver/src/driver.rs",
)
DISK_LOWER = ("write_cpu_s_per_gb", "read_cpu_s_per_gb")
DISK_HIGHER = ("write_share", "read_share")
ROWS = {
    "lookups": Measured("lookup", ("submit_p50_us", "poll_p50_ns", "ready_p50_us"), (), INDEX),
    "steps": Measured("pending", ("step_ms",), (), ("python/undercroft/connector", "rust/pyo3/src")),
    "hooks": Measured(
        "hooks", ("decode_1_us", "decode_4_us", "decode_16_us", "device_hit_us"), (), ("python/undercroft/connector",)
    ),
    "entries": Measured("entries", ("loads of 64 blocks.median_us", "saves of 64 blocks.median_us"), (), INDEX),
    "disk, 2 MiB": Measured("disk", DISK_LOWER, DISK_HIGHER, DISK),
    "disk, 512 KiB": Measured("disk-512k", DISK_LOWER, DISK_HIGHER, DISK),
    "disk, 128 KiB": Measured("disk-128k", DISK_LOWER, DISK_HIGHER, DISK),
    "copies": Measured("copy", (), ("save_share", "load_share"), ("rust/io/src/copy", "rust/io/src/arena")),
    "replay": Measured("replay", (), ("accesses_per_s",), INDEX),
    "open": Measured(
        "open", ("open_s",), (), ("rust/io/src/disk", "rust/engine/src/disk", "rust/engine/src/residency")
    ),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure of a row."""

    row: str
    figure: str
    base: float
    new: float
    ratios: tuple[float, ...]
    """How many times as bad the new version is, by round; empty if a figure is missing or 0."""

    @property
    def is_worse(self) -> bool:
        """Worse than the gate allows in every round, or not measured."""
        return not self.ratios or min(self.ratios) > WORSE


def judge(name: str, row: Measured, found: Sequence[Row]) -> list[Verdict]:
    """The verdicts on a row's figures."""
    by_name = {one.figure: one for one in found}
    verdicts = []
    for figure in (*row.lower, *row.higher):
        one = by_name.get(figure, Row(figure, 0.0, 0.0, ()))
        ratios = one.ratios if figure in row.lower else tuple(1 / ratio for ratio in one.ratios if ratio)
        verdicts.append(Verdict(name, figure, one.base, one.new, ratios))
    return verdicts


def lines(verdicts: Iterable[Verdict]) -> list[str]:
    """A table in Markdown."""
    head = [
        "| row | figure | baseline | measured | times as bad: least, median, most |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in verdicts:
        spread = "not measured"
        if one.ratios:
            spread = f"{min(one.ratios):.2f}, {statistics.median(one.ratios):.2f}, {max(one.ratios):.2f}"
        head.append(f"| {one.row} | {one.figure} | {one.base:.4g} | {one.new:.4g} | {spread} |")
    return head


def files(row: Measured, root: Path = ROOT) -> list[str]:
    """The files of a row's code, relative to the root."""
    found = set()
    for place in row.code:
        path = root / place
        below = [path] if path.is_file() else [*path.rglob("*.rs"), *path.rglob("*.py")]
        found |= {one.relative_to(root).as_posix() for one in below}
    return sorted(found)


def digest(text: str) -> str:
    """The digest of a file's code.

    Comments on lines of their own, white space and the tests at a Rust file's end do not count; nor do names of modules
    and crates in Rust, and who may see a name, so that a file that moves stays the same.
    """
    text = text.split("\n#[cfg(test)]\nmod ")[0]
    text = re.sub(r"(?m)^\s*(?:pub(?:\([^)]*\))? )?(?:use [^;]*|mod \w+);$", "", text)
    text = re.sub(r"\bpub(?:\([^)]*\))? |\b(?:crate|super|undercroft_\w+)::(?:[a-z]\w*::)*", "", text)
    stripped = (line.strip() for line in text.splitlines())
    code = "".join(line for line in stripped if not line.startswith(("//", "#")))
    code = re.sub(r"\s|,(?=\s*[)\]}])", "", code)
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def digests(root: Path = ROOT) -> dict[str, str]:
    """The digests of the code of all rows, by path."""
    paths = sorted({path for row in ROWS.values() for path in files(row, root)})
    return {path: digest((root / path).read_text(encoding="utf-8")) for path in paths}


def changed(row: Measured, measured: Mapping[str, str], now: Mapping[str, str], root: Path = ROOT) -> float:
    """The share of a row's files whose code is new or has changed since it was measured. A file may have moved."""
    paths, known = files(row, root), set(measured.values())
    return sum(now[path] not in known for path in paths) / len(paths)


def record(baseline: dict[str, Any], base: str, verdicts: Sequence[Verdict]) -> None:
    """Write the figures and the measured code's digests."""
    commit, today = git("rev-parse", "HEAD"), datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = {"commit": commit, "date": today, "code": digests()}
    BASELINE.write_text(json.dumps(baseline | {"base": base, "measured": measured}, indent=1) + "\n", encoding="utf-8")
    text = RESULTS.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    title = f"{today} · {machine()} · `make perf-gate`: commit {commit[:8]} against {base[:8]}"
    body = "\n".join((BEGIN, title, "", *lines(verdicts), END))
    RESULTS.write_text(before + body + after, encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("base", metavar="BASE", nargs="?", default="", help="another commit than that of the baseline")
    made.add_argument(
        "--record", action="store_true", help="write the figures if the gate passes; BASE becomes the baseline"
    )
    return made


def main() -> int:
    """Build, measure, judge."""
    args = parser().parse_args()
    baseline = json.loads(BASELINE.read_text(encoding="utf-8"))
    names = [row.bench for row in ROWS.values()]
    try:
        base = resolve(args.base or baseline["base"])
        if args.record and git("status", "--porcelain"):
            raise CompareError("RECORD=1 names the measured commit, and this checkout has changes: commit them first")
        tree = check_out(base)
        for one in (ROOT, tree):
            build(one, names)
        print(f"machine: {machine()}", flush=True)
        start, verdicts = time.monotonic(), []
        for (name, row), (_, found) in zip(ROWS.items(), measure(tree, names, ROUNDS), strict=True):
            verdicts += judge(name, row, found.rows)
        took_s = time.monotonic() - start
    except CompareError as error:
        print(f"perf-gate: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(verdicts)))
    worse = [f"{one.row}: {one.figure}" for one in verdicts if one.is_worse]
    print(f"{took_s:.0f} s of at most {LONGEST_S}", file=sys.stderr)
    if worse:
        limit = f"more than {WORSE - 1:.0%} worse than in {base[:8]} in every round, or not measured"
        print(f"perf-gate: error: {limit}: {'; '.join(worse)}", file=sys.stderr)
        return 1
    if args.record:
        record(baseline, base, verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
