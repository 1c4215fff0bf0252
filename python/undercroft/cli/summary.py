"""``undercroft explain --summary``: sums of lookups and reasons over hours, beside those of a day before."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from undercroft.cli import arguments, engines, output
from undercroft.cli.output import CommandError, say
from undercroft.errors import ConfigError, cause
from undercroft.hours import EVENTS, FILE, HOUR_S, KEPT, LOOKUPS, MISSED, Hours, Sums

DEFAULT_SINCE_S = 24 * HOUR_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the summary."""
    parser.add_argument(
        "--summary",
        action="store_true",
        help="the sums of all lookups since --since by reason, and of orders and evictions, beside those of the same "
        "hours a day before. The engine keeps them for a week in the first directory of disk_path; with --disk-path no "
        "engine need run",
    )
    parser.add_argument(
        "--since",
        type=arguments.duration,
        metavar="TIME",
        help="with --summary: how long ago the sums begin, such as 12h, in whole hours up to 7d (24h)",
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the summary is asked for. Raises ConfigError for arguments that do not go together."""
    if args.since is not None and not args.summary:
        raise ConfigError("--since: goes with --summary only")
    if args.summary and (args.request or args.misses):
        raise ConfigError("--summary: has no single requests; leave --request and --misses out")
    return bool(args.summary)


def run(args: argparse.Namespace) -> int:
    """Print the sums."""
    directory = _directory(args)
    try:
        hours = Hours.read(directory)
    except OSError as error:
        raise CommandError(f"{directory / FILE}: cannot be read ({cause(error)})") from None
    if not hours.sums:
        raise CommandError(f"{directory}: no engine has counted here yet; sums are written once a minute")
    end = int(time.time() // HOUR_S) + 1
    since_s = DEFAULT_SINCE_S if args.since is None else args.since
    length = max(1, -(-since_s // HOUR_S))
    if length > KEPT:
        raise ConfigError(f"--since: sums are kept for {KEPT // 24} days")
    begin, days = end - length, -(-length // 24)
    now, before = hours.between(begin, end), hours.between(begin - 24 * days, end - 24 * days)
    if args.json:
        by_hour = [{"hour": one * HOUR_S, **hours.sums[one]} for one in sorted(hours.sums) if one >= begin]
        sums = {"since": begin * HOUR_S, "sums": now, "days_before": days, "sums_before": before}
        output.print_json({"directory": str(directory), **sums, "hours": by_hour})
        return 0
    since = time.strftime("%a %d %b %H:%M", time.localtime(begin * HOUR_S))
    say(f"{directory}, since {since}")
    say()
    earlier = "a day before" if days == 1 else f"{days} days before"
    output.print_table(("", "now", earlier), [*_of_lookups(now, before), *_of_counters(now, before)])
    return 0


def _directory(args: argparse.Namespace) -> Path:
    """The directory with the sums of the engine that the arguments select."""
    if args.disk_path is not None:
        return Path(args.disk_path)
    socket = engines.socket_of(args)
    disks = engines.ask(socket)["info"].get("disks", ())
    if not disks:
        raise CommandError(f"unix://{socket}: without disk_path an engine keeps no sums")
    return Path(disks[0]["path"])


def _of_lookups(now: Sums, before: Sums) -> list[tuple[Any, ...]]:
    lookups, asked, device, hit = LOOKUPS
    rows: list[tuple[Any, ...]] = [
        (text, _number(now, key), _number(before, key)) for text, key in (("lookups", lookups), ("tokens asked", asked))
    ]
    for text, key in (("on the device", device), ("found in the tiers", hit)):
        rows.append((f"  {text}", _share(now, key, asked), _share(before, key, asked)))
    return rows


def _of_counters(now: Sums, before: Sums) -> list[tuple[Any, ...]]:
    rows = []
    for key in (*MISSED, *EVENTS):
        if now.get(key) or before.get(key):
            words = key.replace("misses_", "nothing found: ").replace("orders_", "order: ").replace("_", " ")
            rows.append((words, _number(now, key), _number(before, key)))
    return rows


def _number(sums: Sums, key: str) -> str | None:
    return f"{sums.get(key, 0):,}" if sums else None


def _share(sums: Sums, key: str, of: str) -> str | None:
    return f"{100 * sums.get(key, 0) / sums[of]:.1f} %" if sums.get(of) else None
