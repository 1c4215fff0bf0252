"""The findings, as a table and as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1
"""Number of the JSON's format."""


LONG = 40
"""A finding of more characters has a line of its own in the table."""


@dataclass(frozen=True, slots=True)
class Row:
    """One finding."""

    name: str
    value: float | str
    unit: str = ""
    goal: str = ""
    ok: bool | None = None
    """Whether the goal is met; None without a goal."""
    must: bool = False
    """Whether undercroft is wrong, not only slow, if ``ok`` is false."""


def at_least(name: str, value: float, goal: float, unit: str = "") -> Row:
    """A figure that should be high."""
    return Row(name, value, unit, f">= {goal:g}", value >= goal)


def at_most(name: str, value: float, goal: float, unit: str = "") -> Row:
    """A figure that should be low."""
    return Row(name, value, unit, f"<= {goal:g}", value <= goal)


def right(name: str, ok: bool, found: str = "") -> Row:
    """Something that must be so."""
    return Row(name, found or ("right" if ok else "WRONG"), goal="right", ok=ok, must=True)


@dataclass(frozen=True, slots=True)
class Section:
    """The findings of one part of the check."""

    name: str
    seconds: float
    rows: Sequence[Row] = ()
    error: str = ""
    """Why the part ended early; empty if it did not."""
    skipped: str = ""
    """Why the part did not run; empty if it did."""


def exit_code(sections: Sequence[Section]) -> int:
    """0; 1 if something is wrong or could not be measured. A goal that is missed is no error."""
    wrong = any(row.must and not row.ok for section in sections for row in section.rows)
    return int(wrong or any(section.error for section in sections))


def as_json(facts: dict[str, Any], sections: Sequence[Section]) -> dict[str, Any]:
    """Everything, as plain values."""
    rows = [(section.name, row) for section in sections for row in section.rows]
    return {
        "format": FORMAT,
        "facts": facts,
        "sections": [asdict(section) for section in sections],
        "wrong": [f"{section}: {row.name}" for section, row in rows if row.must and not row.ok],
        "goals_missed": [f"{section}: {row.name}" for section, row in rows if row.ok is False and not row.must],
        "errors": [f"{section.name}: {section.error}" for section in sections if section.error],
    }


def as_table(facts: dict[str, Any], sections: Sequence[Section]) -> str:
    """Everything, for people."""
    lines = [f"{name:<24} {value}" for name, value in facts.items()]
    cells = [("check", "found", "goal", "")]
    for section in sections:
        cells.append((f"{section.name} ({section.seconds:.1f} s)", "", "", ""))
        if section.skipped:
            cells.append((f"  not run: {section.skipped}", "", "", ""))
        for row in section.rows:
            value = row.value if isinstance(row.value, str) else f"{row.value:g}"
            long = len(value) > LONG
            cells.append((f"  {row.name}", "" if long else f"{value} {row.unit}".strip(), row.goal, _verdict(row)))
            if long:
                cells.append((f"    {value}", "", "", ""))
        if section.error:
            cells.append((f"  ended early: {section.error}", "", "", "ERROR"))
    # A long line of words does not push the figures aside.
    widths = [max(len(row[column]) for row in cells if any(row[1:])) for column in range(3)]
    lines.append("")
    lines += [
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]) for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _verdict(row: Row) -> str:
    if row.ok is None:
        return ""
    if row.ok:
        return "ok"
    return "WRONG" if row.must else "missed"
