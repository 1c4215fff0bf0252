"""Draws docs/images/gain.svg from a table of benches/RESULTS.md: `python tools/chart.py`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches/RESULTS.md"
CHART = ROOT / "docs/images/gain.svg"
HEADING = "## Time to the first token, computed and loaded"
TITLE = "Time to the first token, in milliseconds"
SERIES = (
    ("computed by vLLM", "#94a3b8"),
    ("loaded from host memory", "#2563eb"),
    ("loaded from disk, after a restart", "#0d9488"),
)
WIDTH, LEFT, BAR, GAP, TOP = 880, 150, 20, 22, 92
LONGEST = 600


def rows(results: str) -> list[tuple[int, list[float]]]:
    """Tokens, and the milliseconds of each of `SERIES`, of each row of the record. Raises ValueError without one."""
    record = results.partition(HEADING + "\n")[2].partition("\n## ")[0]
    times = ", ".join([r"([\d.]+)"] * len(SERIES))
    found = re.findall(rf"^\| (\d+) \| {times} \|", record, re.MULTILINE)
    if not found:
        raise ValueError(f'{RESULTS.name} has no table of milliseconds under "{HEADING}"')
    return [(int(tokens), [float(value) for value in row]) for tokens, *row in found]


def source(results: str) -> str:
    """When, where and with which command the figures were taken: the begin of the record's first line."""
    record = results.partition(HEADING + "\n")[2].strip()
    return " ".join(record.partition(":")[0].split()).replace("`", "")


def shown(value: float) -> str:
    """Three digits, zeros at the end included: all labels are equally exact."""
    return f"{value:#.3g}".rstrip(".")


def draw(results: str) -> str:
    """The chart as SVG: a bar for each time of a row, their lengths in proportion to the times."""
    bars = rows(results)
    most = max(max(times) for _, times in bars)
    group = len(SERIES) * BAR + GAP
    height = TOP + len(bars) * group + 30
    spoken = ", ".join(f"{tokens} tokens {', '.join(map(shown, times))}" for tokens, times in bars)
    names = ", ".join(name for name, _ in SERIES)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{TITLE}: {names}: {spoken}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#ffffff"/>',
        f'<text x="24" y="34" font-size="15" font-weight="bold" fill="#0f172a">{TITLE}</text>',
    ]
    x = LEFT
    for name, colour in SERIES:
        lines.append(f'<rect x="{x}" y="54" width="14" height="14" rx="3" fill="{colour}"/>')
        lines.append(f'<text x="{x + 22}" y="66" fill="#475569">{name}</text>')
        x += 60 + 7 * len(name)
    for index, (tokens, times) in enumerate(bars):
        y = TOP + index * group
        middle = y + len(SERIES) * BAR // 2 + 4
        lines.append(f'<text x="{LEFT - 14}" y="{middle}" text-anchor="end" fill="#0f172a">{tokens:,} tokens</text>')
        for row, (value, (_, colour)) in enumerate(zip(times, SERIES, strict=True)):
            top, length = y + row * BAR, LONGEST * value / most
            lines.append(f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR - 2}" rx="3" fill="{colour}"/>')
            lines.append(f'<text x="{LEFT + length + 8:.1f}" y="{top + 14}" fill="#0f172a">{shown(value)}</text>')
    lines.append(f'<text x="24" y="{height - 14}" font-size="12" fill="#475569">{source(results)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    CHART.write_text(draw(RESULTS.read_text(encoding="utf-8")), encoding="utf-8")
