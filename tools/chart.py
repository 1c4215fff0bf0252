"""Draws docs/images/gain.svg from a table of benches/RESULTS.md: `python tools/chart.py`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches/RESULTS.md"
CHART = ROOT / "docs/images/gain.svg"
HEADING = "## A load from host memory, against computing"
TITLE = "Time to the first token, in milliseconds"
SERIES = (("computed by vLLM", "#94a3b8"), ("loaded from host memory", "#2563eb"))
WIDTH, LEFT, BAR, GAP, TOP = 880, 150, 20, 22, 92
LONGEST = 600
LEAST_TOKENS = 128


def rows(results: str) -> list[tuple[int, float, float]]:
    """Tokens, milliseconds of computing and of loading of each row of the record. Raises ValueError without one."""
    record = results.partition(HEADING + "\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (\d+) \| ([\d.]+), ([\d.]+) \|", record, re.MULTILINE)
    if not found:
        raise ValueError(f'{RESULTS.name} has no table of milliseconds under "{HEADING}"')
    return [(int(tokens), float(compute), float(load)) for tokens, load, compute in found]


def source(results: str) -> str:
    """When, where and with which command the figures were taken: the begin of the record's first line."""
    record = results.partition(HEADING + "\n")[2].strip()
    return " ".join(record.partition(":")[0].split()).replace("`", "")


def draw(results: str) -> str:
    """The chart as SVG: two bars a row, their lengths in proportion to the times."""
    bars = [row for row in rows(results) if row[0] >= LEAST_TOKENS]
    most = max(max(compute, load) for _, compute, load in bars)
    height = TOP + len(bars) * (2 * BAR + GAP) + 30
    spoken = ", ".join(f"{tokens} tokens {compute:g} and {load:g}" for tokens, compute, load in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{TITLE}, computed and loaded: {spoken}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#ffffff"/>',
        f'<text x="24" y="34" font-size="15" font-weight="bold" fill="#0f172a">{TITLE}</text>',
    ]
    for (name, colour), x in zip(SERIES, (LEFT, LEFT + 200), strict=True):
        lines.append(f'<rect x="{x}" y="54" width="14" height="14" rx="3" fill="{colour}"/>')
        lines.append(f'<text x="{x + 22}" y="66" fill="#475569">{name}</text>')
    for index, (tokens, *times) in enumerate(bars):
        y = TOP + index * (2 * BAR + GAP)
        lines.append(
            f'<text x="{LEFT - 14}" y="{y + BAR + 5}" text-anchor="end" fill="#0f172a">{tokens:,} tokens</text>'
        )
        for row, (value, (_, colour)) in enumerate(zip(times, SERIES, strict=True)):
            top, length = y + row * BAR, LONGEST * value / most
            lines.append(f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR - 2}" rx="3" fill="{colour}"/>')
            lines.append(f'<text x="{LEFT + length + 8:.1f}" y="{top + 14}" fill="#0f172a">{value:g}</text>')
    lines.append(f'<text x="24" y="{height - 14}" font-size="12" fill="#475569">{source(results)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    CHART.write_text(draw(RESULTS.read_text(encoding="utf-8")), encoding="utf-8")
