"""Draws docs/images/dashboard.svg, the first rows of deploy/grafana.json: `python tools/dashboard.py`.

Places, titles, units, legends and queries are those of the file, and a real Prometheus (Debian's package) answers the
queries. The engine whose samples it has is invented, and the drawing is this program's: no Grafana is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))
PICTURE = ROOT / "docs/images/dashboard.svg"
ROWS = [panel["gridPos"]["y"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["gridPos"]["y"] < ROWS[3]]
DIGEST = hashlib.sha256(json.dumps([PANELS, DASHBOARD["annotations"]]).encode()).hexdigest()[:16]

HOUR, SCRAPES, STEP = 3_600, 60, 180
BEGIN, END = 1_768_435_200, 1_768_456_800
"""From midnight to six, UTC."""
CLEARED = BEGIN + 100 * 60
"""Somebody clears the cache that night."""
CELL, LINE, MARGIN = 50, 28, 8
COLOURS = ("#2563eb", "#0d9488", "#d97706", "#9333ea", "#dc2626", "#64748b")
STYLE = ".row{font-size:15px;font-weight:bold}.name{font-weight:bold}.small{font-size:11px;fill:#475569}"

Series = list[tuple[str, list[tuple[float, float]]]]
"""Legend and points of each line of a panel."""


def rates(at: float) -> dict[str, float]:
    """What the counters of the invented engine grow by in a second."""
    wave = 1 + 0.15 * math.sin(at / 2_900) + 0.06 * math.sin(at / 700) + 0.03 * math.sin(at / 170)
    kept = 1 - math.exp((CLEARED - at) / HOUR) if at > CLEARED else 1.0
    asked, prompts, device = 12_000 * wave, 3 * wave, 0.41
    loaded = {"host": 0.22 * kept, "disk": 0.17 * kept, "remote": 0.03}
    missed = {"never_seen": 0.13, "prompt_end": 0.04, "lost": 0.39 * (1 - kept)}
    late = {"disk": 0.012 * kept, "small": 0.004 * kept, "guarantee": 0.002 * kept}
    found = {"host": loaded["host"], "disk": loaded["disk"], "on_device": device, "miss": 0.13 + missed["lost"]}
    saved = asked * (loaded["host"] + loaded["disk"]) / 9_000
    grow = {"asked_tokens": asked, "device_tokens": asked * device, "saved_time_seconds": saved}
    grow = {named(f"vllm:undercroft_{name}_total"): value for name, value in grow.items()}
    for name, label, of, shares in (
        ("hit_tokens", "tier", asked, loaded),
        ("missed_tokens", "reason", asked, missed),
        ("tokens_not_loaded", "reason", asked, late),
        ("lookups", "outcome", prompts, found),
    ):
        name = f"vllm:undercroft_{name}_total"
        grow |= {named(name, **{label: value}): of * share for value, share in shares.items()}
    grow |= times("vllm:undercroft_lookup_seconds", prompts, 0.0004 + 0.002 * loaded["disk"] * wave, 1.6)
    grow |= times("vllm:undercroft_wait_seconds", prompts * loaded["disk"], 0.018 * wave, 0.7)
    return grow | times("vllm:time_to_first_token_seconds", prompts, 0.1 + 0.8 * (0.13 + missed["lost"]) * wave, 0.5)


def named(name: str, **labels: str) -> str:
    """A series of the invented engine."""
    return (
        name + "{" + ",".join(f'{key}="{value}"' for key, value in {"instance": "node1:8000", **labels}.items()) + "}"
    )


def times(name: str, count: float, median: float, spread: float) -> dict[str, float]:
    """The buckets of a histogram of times around a median."""
    limits = [base * 10**power for power in range(-4, 1) for base in (1, 2.5, 5)]
    within = {f"{limit:g}": math.erf(math.log(limit / median) / spread / math.sqrt(2)) for limit in limits}
    return {named(f"{name}_bucket", le=at): count * (1 + n) / 2 for at, n in (within | {"+Inf": 1.0}).items()}


def samples() -> str:
    """The samples of these hours, and of the same hours a day before, in the format of OpenMetrics."""
    lines: dict[str, list[str]] = {}
    sums: dict[str, float] = {}
    for day in (-24 * HOUR, 0):
        for at in range(BEGIN + day - HOUR, END + day + 1, SCRAPES):
            sums |= {name: sums.get(name, 0.0) + rate * SCRAPES for name, rate in rates(at).items()}
            reads = (1 + math.sin(at / 340) * math.sin(at / 900)) * (40 << 20)
            others = {
                named("vllm:undercroft_orders_total", verb="clear"): float(at > CLEARED),
                named("vllm:undercroft_promotion_queue_bytes"): reads,
            }
            for name, value in (sums | others).items():
                lines.setdefault(name, []).append(f"{name} {value:.6f} {at}")
    return "\n".join(line for one in lines.values() for line in one) + "\n# EOF\n"


@contextlib.contextmanager
def prometheus(place: Path, config: dict[str, Any]) -> Iterator[str]:
    """A Prometheus with its data in a directory; its address."""
    (place / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = {"config.file": "prometheus.yml", "storage.tsdb.path": "db", "web.listen-address": address}
    command = [f"--{name}={value}" for name, value in (flags | {"storage.tsdb.retention.time": "100y"}).items()]
    with subprocess.Popen(["prometheus", *command], stderr=subprocess.DEVNULL, cwd=place) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=10):
                    break
                time.sleep(0.05)
            yield address
        finally:
            process.kill()


def ask(address: str, path: str, **query: object) -> Any:
    """What a Prometheus answers. Raises AssertionError for a query that it refuses."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None


def series(address: str, expression: str, legend: str) -> Series:
    """The lines of a query. Raises ValueError if there are none."""
    query = expression.replace("$instance", ".*").replace("$__rate_interval", "5m")
    found = ask(address, "query_range", query=query, start=BEGIN, end=END, step=STEP)["result"]
    if not found:
        raise ValueError(f"no samples for {expression}")

    return [
        (
            re.sub(r"{{(\w+)}}", lambda label, of=one["metric"]: of.get(label[1], ""), legend),
            [(at, float(value)) for at, value in one["values"] if value != "NaN"],
        )
        for one in found
    ]


def picture(history: str) -> str:
    """The dashboard as SVG, over these samples."""
    with tempfile.TemporaryDirectory(prefix="dashboard-") as name:
        place = Path(name)
        (place / "samples").write_text(history, encoding="utf-8")
        blocks = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "samples", "db"]
        subprocess.run(blocks, cwd=place, check=True, capture_output=True)
        with prometheus(place, {}) as address:
            (orders,) = DASHBOARD["annotations"]["list"]
            marks = series(address, orders["expr"], orders["titleFormat"])
            lines = [
                [one for t in panel.get("targets", ()) for one in series(address, t["expr"], t["legendFormat"])]
                for panel in PANELS
            ]
    drawn = "".join(draw(panel, of, marks) for panel, of in zip(PANELS, lines, strict=True))
    size = f'width="{24 * CELL}" height="{LINE * ROWS[3]}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {24 * CELL} {LINE * ROWS[3]}" role="img" '
        f'aria-label="{", ".join(panel["title"] for panel in PANELS)}" data-digest="{DIGEST}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13" fill="#0f172a">'
        f'<style>{STYLE}</style><rect {size} fill="#f1f5f9"/>{drawn}</svg>\n'
    )


def axis(most: float, unit: str) -> tuple[float, list[str]]:
    """The end of an axis, a round number, and the labels of its quarters."""
    scale, name = {"percentunit": (0.01, " %"), "bytes": (1 << 20, " MiB"), "reqps": (1, " req/s")}.get(unit, (1, ""))
    if unit == "s":
        scale, name = (1, " s") if most > 1 else (0.001, " ms")
    power = 10 ** math.floor(math.log10(most / scale))
    end = next(n * power for n in (1, 2, 4, 6, 8, 10) if n * power * scale >= most)
    return end * scale, [f"{end * n / 4:,g}{name}" for n in range(5)]


def draw(panel: dict[str, Any], lines: Series, marks: Series) -> str:
    """A panel: its title, axes, lines, legend, and the orders."""
    place, title = panel["gridPos"], panel["title"]
    left, top = place["x"] * CELL + MARGIN // 2, place["y"] * LINE
    if panel["type"] == "row":
        return f'<text class="row" x="{left + MARGIN}" y="{top + 20}">{title}</text>'
    look = panel["fieldConfig"]["defaults"]
    wide, high = place["w"] * CELL - MARGIN, place["h"] * LINE - MARGIN
    x0, x1, y0, y1 = left + 64, left + wide - 20, top + high - 58, top + 36
    end, labels = axis(look.get("max") or max(value for _, points in lines for _, value in points), look["unit"])
    drawn = [
        f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" rx="6" fill="#fff" stroke="#cbd5e1"/>',
        f'<text class="name" x="{left + 12}" y="{top + 22}">{title}</text>',
    ]

    def x(at: float) -> float:
        return round(x0 + (x1 - x0) * (at - BEGIN) / (END - BEGIN), 1)

    def y(value: float) -> float:
        return round(y0 - (y0 - y1) * value / end, 1)

    for n, label in enumerate(labels):
        drawn.append(f'<path d="M{x0} {y(end * n / 4)}H{x1}" stroke="#e2e8f0"/>')
        drawn.append(f'<text class="small" x="{x0 - 6}" y="{y(end * n / 4) + 4}" text-anchor="end">{label}</text>')
    for at in range(BEGIN, END + 1, 2 * HOUR):
        label = time.strftime("%H:%M", time.gmtime(at))
        drawn.append(f'<text class="small" x="{x(at)}" y="{y0 + 16}" text-anchor="middle">{label}</text>')
    stacked = "stacking" in look.get("custom", {})
    below: dict[float, float] = {}
    across, down = x0, y0 + 34
    for (name, points), colour in zip(lines, itertools.cycle(COLOURS), strict=False):
        path = " ".join(f"{x(at)},{y(value + below.get(at, 0))}" for at, value in points)
        if stacked:
            under = " ".join(f"{x(at)},{y(below.get(at, 0))}" for at, _ in reversed(points))
            drawn.append(f'<polygon points="{path} {under}" fill="{colour}" fill-opacity="0.3"/>')
            below |= {at: value + below.get(at, 0) for at, value in points}
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if across + 20 + 6 * len(name) > x1:
            across, down = x0, down + 16
        drawn.append(f'<path d="M{across} {down - 4}h12" stroke="{colour}" stroke-width="3"/>')
        drawn.append(f'<text class="small" x="{across + 16}" y="{down}">{name}</text>')
        across += 32 + 6 * len(name)
    for name, points in marks:
        place_of = f"M{x(points[0][0])} {y0}V{y1}"
        drawn.append(f'<path d="{place_of}" stroke="#ea580c" stroke-dasharray="4 3"><title>{name}</title></path>')
    return "".join(drawn)


if __name__ == "__main__":
    PICTURE.write_text(picture(samples()), encoding="utf-8")
