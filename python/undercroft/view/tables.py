"""The tables of the picture: text, which a terminal and a page show each in its way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from undercroft.cli.output import age_text
from undercroft.metrics import ORDERS
from undercroft.units import format_size
from undercroft.view.readings import COMPUTED, OTHER, Disk, Reading, Times

TROUBLES = (
    "checksum_failures",
    "host_checksum_failures",
    "decryption_failures",
    "read_failures",
    "write_failures",
    "load_failures",
    "save_failures",
    "hook_errors",
)
"""Counters that an operator should see if they are not 0."""
_SOURCES = ("device", "host", "disk", "remote", OTHER, COMPUTED)


class Alarm(str):
    """A cell that somebody should look at."""


@dataclass(frozen=True, slots=True)
class Table:
    """A heading, the names of the columns, and the rows."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of the picture."""

    name: str
    now: Reading | None = None
    before: Reading | None = None
    """The earlier reading from which rates are computed."""
    trouble: str = ""
    """Why there is no reading."""

    def rate(self, *keys: str) -> float | None:
        """Growth of these counters in a second, together; None without an earlier reading, or if no key exists."""
        if self.now is None or self.before is None or self.now.at <= self.before.at:
            return None
        grown = [self.now.stats[key] - self.before.stats.get(key, 0) for key in keys if key in self.now.stats]
        return max(0.0, sum(grown)) / (self.now.at - self.before.at) if grown else None


def tables(engines: Sequence[Engine]) -> list[Table]:
    """The picture. A table without rows is left out, but for the first, which has a row for each engine."""
    answered = [(one, one.now) for one in engines if one.now is not None]
    found = [
        Table("Engines", ("engine", "state", "up", "host memory", "disk", "loads", "saves"), [*map(_engine, engines)]),
        Table(
            "Trouble", ("engine", "what"), [(one.name, Alarm(what)) for one, now in answered for what in _troubles(now)]
        ),
        Table("Prompt tokens by source", ("engine", "tokens/s", *_SOURCES), _rows(_tokens, answered)),
        Table(
            "Waits",
            ("engine", "lookups/s", "now", "to read", "waited p50", "waited p99", "TTFT p50", "TTFT p99"),
            _rows(_waits, answered),
        ),
        Table(
            "Disks",
            ("engine", "directory", "health", "reads p50", "reads p99", "writes p50", "writes p99"),
            [_disk(one, disk) for one, now in answered for disk in now.disks],
        ),
        Table(
            "Remote store",
            ("engine", "store", "state", "read", "written", "queue", "failures"),
            _rows(_remote, answered),
        ),
        Table("Orders", ("engine", "since the start"), _rows(_orders, answered)),
    ]
    return [found[0], *(one for one in found[1:] if one.rows)]


def _rows(
    row: Callable[[Engine, Reading], tuple[str, ...] | None], engines: Iterable[tuple[Engine, Reading]]
) -> list[tuple[str, ...]]:
    return [found for one, now in engines if (found := row(one, now)) is not None]


def _engine(one: Engine) -> tuple[str, ...]:
    if one.now is None:
        return one.name, Alarm(one.trouble or "no answer yet"), *["-"] * 5
    stats = one.now.stats
    state = Alarm("draining") if stats.get("draining") else "answers"
    return (
        one.name,
        state,
        age_text(one.now.uptime_s),
        _tier(stats, "host"),
        _tier(stats, "disk"),
        *(_moving(one, stats, direction) for direction in ("load", "save")),
    )


def _moving(one: Engine, stats: Mapping[str, float], direction: str) -> str:
    """How fast a vLLM loads or saves, or how many loads or saves a server has now."""
    now = stats.get(f"{direction}s")
    return _bytes_rate(one, f"{direction}_bytes") if now is None else f"{int(now)} now"


def _tier(stats: Mapping[str, float], tier: str) -> str:
    capacity = stats.get(f"{tier}_capacity_bytes", 0)
    if not capacity:
        return "-"
    used = stats.get(f"{tier}_used_bytes", 0)
    size = f"{format_size(int(used))} of {format_size(int(capacity))}"
    target = stats.get(f"{tier}_target_bytes", capacity)
    return size if target >= capacity else f"{size}, to be {format_size(int(target))}"


def _tokens(one: Engine, now: Reading) -> tuple[str, ...] | None:
    if not now.tokens:
        return None
    grown = dict(now.tokens)
    rate = "-"
    if one.before is not None and one.before.tokens and now.at > one.before.at:
        new = {source: max(0.0, count - one.before.tokens.get(source, 0)) for source, count in now.tokens.items()}
        rate = f"{sum(new.values()) / (now.at - one.before.at):.0f}"
        grown = new if any(new.values()) else grown
    whole = sum(grown.values())
    return one.name, rate, *(f"{100 * grown[source] / whole:.0f} %" if whole else "-" for source in _SOURCES)


def _waits(one: Engine, now: Reading) -> tuple[str, ...]:
    outcomes = [key for key in now.stats if key.startswith("lookups_")]
    lookups = one.rate("server_lookups") if "server_lookups" in now.stats else one.rate(*outcomes)
    queue = now.stats.get("promotion_queue_bytes", 0)
    parts = []
    for name in ("wait", "first token"):
        before = one.before.times.get(name) if one.before is not None else None
        times = now.times.get(name, Times()).since(before)
        parts += [times.within(0.5), times.within(0.99)]
    rate = "-" if lookups is None else f"{lookups:.1f}"
    return one.name, rate, _number(now.stats.get("active_lookups")), format_size(int(queue)), *parts


def _disk(one: Engine, disk: Disk) -> tuple[str, ...]:
    before = next((old for old in one.before.disks if old.path == disk.path), None) if one.before is not None else None
    parts = []
    for way in ("load", "save"):
        times = getattr(disk, way).since(getattr(before, way) if before is not None else None)
        parts += [times.within(0.5), times.within(0.99)]
    health = disk.health if disk.health in ("", "good") else Alarm(disk.health)
    return one.name, disk.path, health or "-", *parts


def _remote(one: Engine, now: Reading) -> tuple[str, ...] | None:
    stats = now.stats
    moved = any(stats.get(key) for key in ("remote_lookups", "remote_puts", "remote_failures", "remote_degraded"))
    if now.remote is None and not moved:
        return None
    state = "good"
    if stats.get("remote_degraded") or stats.get("remote_breaker_open"):
        state = Alarm("asked no more for now" if stats.get("remote_breaker_open") else "degraded")
    failures = int(sum(stats.get(key, 0) for key in ("remote_failures", "remote_corrupt", "remote_throttled")))
    return (
        one.name,
        str((now.remote or {}).get("url", "-")),
        state,
        *(_bytes_rate(one, key) for key in ("remote_get_bytes", "remote_put_bytes")),
        _number(stats.get("remote_put_queue_segments")),
        str(failures),
    )


def _orders(one: Engine, now: Reading) -> tuple[str, ...] | None:
    """The orders that were given, and how many of them came since the earlier reading."""
    said = []
    for verb in ORDERS:
        count = int(now.stats.get(f"orders_{verb}", 0))
        new = count - int(one.before.stats.get(f"orders_{verb}", 0)) if one.before is not None else 0
        if count:
            said.append(f"{verb} {count}" + (f" (+{new} now)" if new > 0 else ""))
    return (one.name, ", ".join(said)) if said else None


def _troubles(now: Reading) -> list[str]:
    stats = now.stats
    counted = [f"{int(stats[name])} {name.replace('_', ' ')}" for name in TROUBLES if stats.get(name)]
    said = [", ".join(counted)] if counted else []
    said += [f"{disk.path}: {disk.fault}" for disk in now.disks if disk.fault]
    if stats.get("disk_degraded") and not any(disk.fault for disk in now.disks):
        said.append(f"{int(stats['disk_degraded'])} directories take no writes, do not answer, or have failed")
    if now.remote and now.remote.get("fault"):
        said.append(f"{now.remote.get('url')}: {now.remote['fault']}")
    return said


def _bytes_rate(one: Engine, key: str) -> str:
    rate = one.rate(key)
    return "-" if rate is None else f"{format_size(int(rate))}/s"


def _number(value: float | None) -> str:
    return "-" if value is None else str(int(value))
