"""``undercroft status``: what a running server holds and does."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from undercroft.cli import output, planning
from undercroft.cli.serve import DEFAULT_SOCKET, absolute_path, default_socket
from undercroft.errors import UndercroftError
from undercroft.metrics import METRICS
from undercroft.units import format_size

# A server answers within milliseconds; one that does not is frozen.
TIMEOUT_S = 2.0
# Between the two readings from which rates come.
INTERVAL_S = 1.0
COUNTERS = frozenset(key for metric in METRICS if metric.kind == "counter" for key in metric.sources)
# Counters that an operator should know of when they are not 0.
TROUBLES = (
    "checksum_failures",
    "host_checksum_failures",
    "read_failures",
    "write_failures",
    "load_failures",
    "save_failures",
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "status",
        parents=[shared],
        help="show what a running server holds and does",
        description="Asks a server started by `undercroft serve`. Exit code 1 if none answers.",
    )
    parser.add_argument("--socket", type=absolute_path, metavar="PATH", help=f"the server's ({DEFAULT_SOCKET})")
    parser.add_argument(
        "--watch", type=_seconds, metavar="S", help="show it again every S seconds; with --json, an object a line"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the status, once or until interrupted."""
    socket = args.socket or default_socket()
    if args.watch is None:
        first = _ask(socket)
        time.sleep(INTERVAL_S)
        status = with_rates(first, _ask(socket))
        if args.json:
            output.print_json(status)
        else:
            print_status(status)
        return 0
    return _watch(socket, args.watch, as_json=args.json)


def with_rates(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The status with ``rates``: how much each counter grew per second since ``before``.

    None where there is no earlier reading of the same server.
    """
    if before is None or before["pid"] != now["pid"] or now["uptime_s"] <= before["uptime_s"]:
        return now | {"rates": None}
    seconds = now["uptime_s"] - before["uptime_s"]
    old, new = (reading["stats"] | {"lookups": reading["server"]["lookups"]} for reading in (before, now))
    counters = [name for name in new if name in COUNTERS or name == "lookups"]
    return now | {"rates": {name: (new[name] - old[name]) / seconds for name in counters}}


def print_status(status: dict[str, Any]) -> None:
    """The status as text."""
    stats, server, rates = status["stats"], status["server"], status["rates"]
    print(
        f"undercroft {status['version']}, pid {status['pid']}, up {output.age_text(status['uptime_s'])}, "
        f"unix://{status['socket']}"
    )
    print(
        f"{server['connections']} connections, {server['workers']} workers, {server['descriptors']} descriptors, "
        f"{server['lookups']} lookups"
    )
    if server["refused"] or server["malformed"]:
        print(f"{server['refused']} connections refused, {server['malformed']} ended by a malformed frame")
    print(
        f"under way: {stats['active_lookups']} lookups, {stats['loads']} loads, {stats['saves']} saves, "
        f"{format_size(stats['promotion_queue_bytes'])} to be read from disk"
    )
    if troubles := [f"{stats[name]} {name.replace('_', ' ')}" for name in TROUBLES if stats.get(name)]:
        print(f"trouble: {', '.join(troubles)}")
    print()
    output.print_table(
        ("tier", "used", "capacity", "blocks", "evictions"), [_tier(stats, "host"), _tier(stats, "disk")]
    )
    if disks := status["info"].get("disks"):
        print()
        output.print_table(("disk", "capacity", "health", "trouble"), [_disk(disk) for disk in disks])
    if plan := planning.sentence(stats):
        print(f"\n{plan}")
        output.print_table(("tokens", "computing", "loading from disk", "equal at"), planning.table(stats))
    if status["sessions"]:
        print()
        columns = ("connected", "workers", "lookups", "pending", "loads", "saves")
        sizes = ("load_bytes", "save_bytes", "request_bytes")
        output.print_table(
            ("session", *columns, "loading", "saving", "requests"),
            [
                (
                    session["namespace"][:12],
                    *(session[name] for name in columns),
                    *(format_size(session[name]) for name in sizes),
                )
                for session in status["sessions"]
            ],
        )
    if rates is not None:
        print()
        read, written = (f"{format_size(rates[f'disk_{way}_bytes'])}/s" for way in ("read", "write"))
        print(
            f"rates: {rates['lookups']:.1f} lookups/s, {rates['saved_blocks']:.1f} blocks saved/s, "
            f"disk {read} read, {written} written"
        )


def _tier(stats: dict[str, Any], tier: str) -> tuple[Any, ...]:
    used, capacity = stats[f"{tier}_used_bytes"], stats[f"{tier}_capacity_bytes"]
    return tier, format_size(used), format_size(capacity), stats[f"{tier}_blocks"], stats[f"{tier}_evictions"]


def _disk(disk: dict[str, Any]) -> tuple[Any, ...]:
    return disk["path"], format_size(disk["capacity"]), disk["health"], disk["fault"] or ""


def _watch(socket: str, interval_s: float, *, as_json: bool) -> int:
    """A server that goes away is waited for: it may be on its way back."""
    before = None
    while True:
        try:
            now = _ask(socket)
        except UndercroftError as error:
            before = None
            print(f"undercroft: {error}", file=sys.stderr, flush=True)
        else:
            status = with_rates(before, now)
            before = now
            if as_json:
                print(json.dumps(status), flush=True)
            else:
                # To the upper left, and clear the screen.
                print("\033[H\033[2J" if sys.stdout.isatty() else "", end="")
                print_status(status)
                print(flush=True)
        time.sleep(interval_s)


def _ask(socket: str) -> dict[str, Any]:
    from undercroft import _core

    return _core.server_status(socket, TIMEOUT_S)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 86400 seconds")
    return seconds
