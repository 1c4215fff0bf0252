"""Draws the pictures of `undercroft top` and of the server's page in docs/images: `python tools/pictures.py`.

The engines in them are invented, and shown by the same code as real ones.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from undercroft.cli.top import picture
from undercroft.view.page import STYLE, body
from undercroft.view.readings import COMPUTED, OTHER, Disk, Reading, Times
from undercroft.view.tables import Engine, tables

IMAGES = Path(__file__).resolve().parent.parent / "docs/images"
LIMITS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
COLUMNS = 120
PAGE_WIDTH, PAGE_HEIGHT = 1000, 690
GIB = 1 << 30


def times(*counts: int) -> Times:
    """Times of which so many are in each of the ranges between the limits."""
    upto = [sum(counts[: place + 1]) for place in range(len(LIMITS))]
    return Times(LIMITS, (*upto, sum(counts)))


def invented(at: float, prompts: int, *, served: bool) -> Reading:
    """An engine after so many prompts of 4,000 tokens. ``served``: as a server tells of it, else as a vLLM does."""
    shares = {"device": 41, "host": 22, "disk": 17, "remote": 3, OTHER: 0, COMPUTED: 17}
    reads, writes = times(0, 40, 900, 55, 5), times(300, 620, 70, 10)
    stats = {
        "host_capacity_bytes": 64 * GIB,
        "host_used_bytes": 58 * GIB,
        "disk_capacity_bytes": 1024 * GIB,
        "disk_used_bytes": 731 * GIB,
        "promotion_queue_bytes": GIB,
        "orders_clear": 1,
    }
    if served:
        stats |= {"active_lookups": 4, "loads": 3, "saves": 1, "server_lookups": prompts, "disk_degraded": 1}
    else:
        stats |= {"lookups_disk": prompts, "load_bytes": prompts * GIB // 8, "save_bytes": prompts * GIB // 32}
    health = ("good", "no_writes") if served else ("", "")
    disks = [
        Disk("/mnt/nvme0/undercroft", reads, writes, health[0]),
        Disk("/mnt/nvme1/undercroft", reads, writes, health[1], "No space left on device" if served else ""),
    ]
    waits = {"wait": times(0, 0, 5, 60, 300, 80, 10), "first token": times(0, 0, 0, 0, 10, 200, 300, 40, 5)}
    tokens = {source: 40.0 * prompts * share for source, share in shares.items()}
    if served:
        return Reading("", at, "0.1.0", 362_880, stats, tuple(disks))
    return Reading("", at, "0.1.0", None, stats, tuple(disks), None, waits, tokens)


def engine(name: str, *, served: bool) -> Engine:
    """An invented engine, with an earlier reading."""
    return Engine(name, invented(30, 10_360, served=served), invented(0, 10_000, served=served))


def top() -> str:
    """The terminal, as SVG."""
    shown = [
        engine("node1:8000", served=False),
        engine("node1:9400", served=True),
        engine("node2:8000", served=False),
        Engine("node2:9400", trouble="Connection refused (12 s)"),
    ]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False, force_terminal=True)
    console.print(picture(tables(shown)))
    drawn = console.export_svg(title="undercroft top node1:8000 node1:9400 node2:8000 node2:9400", unique_id="top")
    # The fonts of its template come from elsewhere; the reader's own does as well.
    return re.sub(r"\s*@font-face \{[^}]*\}", "", drawn)


def page() -> str:
    """The server's page, as SVG with its HTML inside."""
    inside = body("undercroft 0.1.0 on node1", tables([engine("pid 4242", served=True)]))
    style = STYLE.replace("body {", ".page {").replace(":root {", ".page { background: Canvas; color: CanvasText;")
    size = f'width="{PAGE_WIDTH}" height="{PAGE_HEIGHT}"'
    view = f"0 0 {PAGE_WIDTH} {PAGE_HEIGHT}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="{view}"><style>{style}</style>'
        f'<foreignObject {size}><div xmlns="http://www.w3.org/1999/xhtml" class="page">{inside}</div></foreignObject>'
        "</svg>\n"
    )


if __name__ == "__main__":
    for name, draw in (("top", top), ("page", page)):
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")
