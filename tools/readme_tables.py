"""Rewrites the tables of README.md that come from the code: `python tools/readme_tables.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undercroft.metrics import Metric

README = Path(__file__).resolve().parent.parent / "README.md"


def render(text: str) -> str:
    """The README with its tables as the code has them now; each stands between two comments of its name."""
    for name, table in _tables().items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if not marked.search(text):
            raise ValueError(f"{README} lacks the comments <!-- {name} --> and <!-- end of {name} -->")
        text = marked.sub(lambda match, table=table: match[1] + table + match[2], text)
    return text


def _tables() -> dict[str, str]:
    from undercroft.config import option_table
    from undercroft.metrics import METRICS, SERVER_METRICS

    return {
        "options": option_table(),
        "metrics": _metric_table(METRICS),
        "server metrics": _metric_table(SERVER_METRICS),
    }


def _metric_table(metrics: tuple[Metric, ...]) -> str:
    from undercroft.metrics import PREFIX

    lines = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        suffix = "_total" if metric.kind == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{PREFIX}{metric.name}{suffix}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
