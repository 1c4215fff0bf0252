"""``undercroft status``: contents and activity of a running engine: a server's, or one inside a vLLM."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from undercroft.cli import arguments, engines, output, planning
from undercroft.cli.output import say
from undercroft.cli.sockets import absolute_path, default_socket
from undercroft.errors import UndercroftError
from undercroft.metrics import METRICS
from undercroft.units import format_size
from undercroft.view.readings import of_latency
from undercroft.view.tables import TROUBLES

# Seconds between the two readings from which rates are computed.
INTERVAL_S = 1.0
COUNTERS = frozenset(key for metric in METRICS if metric.kind == "counter" for key in metric.sources)

_SESSION = {
    "connected": "connected",
    "workers": "workers",
    "answered": "answered",
    "hits": "hits",
    "loaded": "loaded_bytes",
    "saved": "saved_bytes",
    "lookups now": "lookups",
    "pending": "pending",
    "loads": "loads",
    "saves": "saves",
    "request memory": "request_bytes",
    "held": "held_bytes",
    "in host memory": "host_bytes",
    "on disk": "disk_bytes",
    "share": "tenant_share",
}
"""Column of a session -> its field: totals since the session was opened, then pending numbers."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "status",
        parents=[shared],
        help="show contents and activity of running engines",
        description="Shows the tiers, disks and sessions of `undercroft serve`, or of the engine inside a vLLM. "
        "Without --socket and --disk-path: the engine of this user, or a line for each if there are several. Exit "
        "code 1 if none answers.",
        epilog="example: undercroft status --disk-path /var/cache/undercroft --watch 2",
    )
    arguments.add_engine(parser, absolute_path)
    parser.add_argument(
        "--watch",
        type=arguments.seconds,
        metavar="S",
        help="repeat every S seconds (with --json, one object per line)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the status, once or until interrupted."""
    socket = args.socket
    if args.disk_path is not None:
        socket = engines.of_directory(args.disk_path)
    elif socket is None:
        found = engines.all_of_user()
        if len(found) > 1 and args.watch is None:
            _list(found, as_json=args.json)
            return 0
        # With --watch the engine may start later, for example a server that restarts.
        socket = default_socket() if args.watch is not None and not found else engines.only_one(found)
    if args.watch is not None:
        return _watch(socket, args.watch, as_json=args.json)
    first = engines.ask(socket)
    time.sleep(INTERVAL_S)
    status = with_rates(first, engines.ask(socket))
    if args.json:
        output.print_json(status)
    else:
        print_status(status)
    return 0


def _list(found: list[dict[str, Any]], *, as_json: bool) -> None:
    """A line for each engine."""
    if as_json:
        output.print_json({"engines": found})
        return
    rows = []
    for one in found:
        stats, disks = one["stats"], one["info"].get("disks", ())
        host, disk = (format_size(stats[f"{tier}_used_bytes"]) for tier in ("host", "disk"))
        places = ", ".join(str(disk["path"]) for disk in disks)
        rows.append(
            (one["pid"], output.age_text(one["uptime_s"]), host, disk, places or "-", f"unix://{one['socket']}")
        )
    output.print_table(("pid", "up", "host used", "disk used", "directories", "socket"), rows)
    say(file=sys.stderr)
    say("more of one: undercroft status --socket PATH", file=sys.stderr)


def with_rates(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The status with ``rates``: each counter's increase per second since ``before``.

    The rates are None if there is no earlier reading of the same server.
    """
    if before is None or before["pid"] != now["pid"] or now["uptime_s"] <= before["uptime_s"]:
        return now | {"rates": None}
    seconds = now["uptime_s"] - before["uptime_s"]
    old, new = (reading["stats"] | {"lookups": _answered(reading)} for reading in (before, now))
    counters = [name for name in new if name in COUNTERS or name == "lookups"]
    # The lookups of a session that has ended are no longer counted.
    return now | {"rates": {name: max(0, new[name] - old[name]) / seconds for name in counters}}


def _answered(status: dict[str, Any]) -> int:
    """Requests of the open sessions whose lookup was answered. For an embedded engine the server counts none."""
    return sum(int(session["answered"]) for session in status["sessions"])


def print_status(status: dict[str, Any]) -> None:
    """The status as text."""
    stats, server, rates = status["stats"], status["server"], status["rates"]
    say(
        f"undercroft {status['version']}, pid {status['pid']}, up {output.age_text(status['uptime_s'])}, "
        f"unix://{status['socket']}"
    )
    say(
        f"{output.count(_answered(status), 'request')} answered, {output.count(server['connections'], 'connection')}, "
        f"{output.count(server['workers'], 'worker')}, {output.count(server['descriptors'], 'open file')}"
    )
    if server["refused"] or server["malformed"]:
        say(f"{server['refused']} connections refused, {server['malformed']} ended by a malformed frame")
    say(
        f"under way: {output.count(stats['active_lookups'], 'lookup')}, {output.count(stats['loads'], 'load')}, "
        f"{output.count(stats['saves'], 'save')}, "
        f"{format_size(stats['promotion_queue_bytes'])} to be read from disk"
    )
    if stats.get("draining"):
        say("draining: no save and no read from disk begins (undercroft drain --cancel ends that)")
    if troubles := [f"{stats[name]} {name.replace('_', ' ')}" for name in TROUBLES if stats.get(name)]:
        say(f"trouble: {', '.join(troubles)}")
    say()
    info = status["info"]
    disks = info.get("disks", [])
    at_start = {"host": info.get("host_memory", 0), "disk": sum(disk["capacity"] for disk in disks)}
    tiers = [_tier(stats, tier, size) for tier, size in at_start.items()]
    output.print_table(("tier", "used", "capacity", "blocks", "evictions"), tiers)
    if disks:
        say()
        latencies = tuple(f"{way} {part}" for way in ("reads", "writes") for part in ("p50", "p99"))
        output.print_table(("disk", "capacity", "health", *latencies, "trouble"), [_disk(disk) for disk in disks])
    for _, plan, of_tier in planning.of_tiers(stats):
        say()
        say(plan)
        output.print_table(planning.HEADER, planning.table(of_tier))
    if status["sessions"]:
        say()
        output.print_table(("session", *_SESSION), map(_session, status["sessions"]))
    if rates is not None:
        say()
        read, written = (f"{format_size(rates[f'disk_{way}_bytes'])}/s" for way in ("read", "write"))
        say(
            f"rates: {rates['lookups']:.1f} lookups/s, {rates['saved_blocks']:.1f} blocks saved/s, "
            f"disk {read} read, {written} written"
        )


def _session(session: dict[str, Any]) -> tuple[Any, ...]:
    values = (format_size(session[name]) if name.endswith("_bytes") else session[name] for name in _SESSION.values())
    return session["namespace"][:12], *values


def _tier(stats: dict[str, Any], tier: str, at_start: int) -> tuple[Any, ...]:
    used, capacity = stats[f"{tier}_used_bytes"], stats[f"{tier}_capacity_bytes"]
    size = format_size(capacity)
    if (target := stats.get(f"{tier}_target_bytes", capacity)) < capacity:
        size += f", to be {format_size(target)}"
    if target < at_start:
        size += f" ({format_size(at_start)} at the start)"
    return tier, format_size(used), size, stats[f"{tier}_blocks"], stats[f"{tier}_evictions"]


def _disk(disk: dict[str, Any]) -> tuple[Any, ...]:
    times = [one.within(part) for one in of_latency(disk.get("latency")) for part in (0.5, 0.99)]
    return disk["path"], format_size(disk["capacity"]), disk["health"], *times, disk["fault"] or ""


def _watch(socket: str, interval_s: float, *, as_json: bool) -> int:
    """Print the status repeatedly. If the engine ends, print the error once and wait for an engine at the same socket:
    it may restart."""
    before, said = None, ""
    while True:
        try:
            now = engines.ask(socket)
        except UndercroftError as error:
            before = None
            if str(error) != said:
                say(f"undercroft: {error}; waiting for it", file=sys.stderr, flush=True)
            said = str(error)
        else:
            said = ""
            status = with_rates(before, now)
            before = now
            if as_json:
                say(json.dumps(status), flush=True)
            else:
                output.clear_screen()
                print_status(status)
                say(flush=True)
        time.sleep(interval_s)
