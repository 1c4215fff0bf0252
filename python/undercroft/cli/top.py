"""``undercroft top``: a live view of several engines and hosts in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from undercroft.cli import arguments, engines
from undercroft.cli.output import CommandError, print_json, say
from undercroft.errors import ConfigError
from undercroft.printable import printable
from undercroft.view.hosts import TIMEOUT_S, WINDOW_S, Hosts, address
from undercroft.view.tables import Alarm, Engine, Table, tables

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable, Group

# Seconds between the two readings of `--once`, from which rates are computed.
ONCE_S = 1.0
# Of a picture that a script reads: no line is broken.
SCRIPT_COLUMNS = 200


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "top",
        parents=[shared],
        help="show several engines and hosts live in the terminal",
        description="Shows tiers, prompt tokens by source, waits, latencies of disks, the remote store and orders of "
        f"the engines at these addresses. Rates and latencies are those of the last {WINDOW_S:g} seconds, or since the "
        "start where nothing happened in them. An address that does not answer is shown as such and delays no other. "
        "Ends with Ctrl-C. With --once, exit code 1 if an address does not answer.",
        epilog="example: undercroft top node1:8000 node2:8000 node1:9400 node2:9400",
    )
    parser.add_argument(
        "addresses",
        nargs="*",
        type=address,
        metavar="ADDRESS",
        help="HOST:PORT or http(s)://HOST:PORT of a vLLM or of `undercroft serve --metrics`, or unix://PATH (default: "
        "the sockets of this user's engines). Only a vLLM's address has tokens by source and waits",
    )
    parser.add_argument("--once", action="store_true", help="print one picture, for scripts, after a second")
    parser.add_argument(
        "--interval",
        type=arguments.seconds,
        default=2.0,
        metavar="S",
        help="seconds between two pictures (%(default)g); with --json, one object a line",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the engines, once or until interrupted."""
    draw = None if args.json else _drawing()
    places = args.addresses or [f"unix://{one['socket']}" for one in engines.all_of_user()]
    if not places:
        raise CommandError("no engine of this user answers here; give addresses, such as: undercroft top node1:8000")
    if args.once:
        return _once(Hosts(places, ONCE_S), draw)
    hosts = Hosts(places, args.interval)
    hosts.wait(1, TIMEOUT_S)
    if draw is None:
        while True:
            say(json.dumps(_object(hosts.engines())), flush=True)
            time.sleep(args.interval)
    return _live(hosts, draw, args.interval)


def _once(hosts: Hosts, draw: Console | None) -> int:
    hosts.wait(2, ONCE_S + 2 * TIMEOUT_S)
    found = hosts.engines()
    if draw is None:
        print_json(_object(found))
    else:
        draw.print(picture(tables(found)))
    silent = [one for one in found if one.now is None]
    if silent:
        raise CommandError(f"{len(silent)} of {len(found)} do not answer: {', '.join(one.name for one in silent)}")
    return 0


def _live(hosts: Hosts, draw: Console, interval_s: float) -> int:
    """Draw until interrupted. Without a terminal, the pictures follow each other."""
    from rich.live import Live

    if not draw.is_terminal:
        while True:
            draw.print(picture(tables(hosts.engines())))
            time.sleep(interval_s)
    with Live(console=draw, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(tables(hosts.engines())), refresh=True)
            time.sleep(interval_s)


def _drawing() -> Console:
    """The library's view of this terminal. Raises ConfigError if the library for it is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        raise ConfigError(
            "undercroft top draws with rich, which is not installed; run: pip install 'undercroft[top]', or give --json"
        ) from None
    # Colours of strings and numbers would say nothing.
    console = Console(highlight=False)
    if not sys.stdout.isatty():
        console.width = SCRIPT_COLUMNS
    return console


def picture(shown: Sequence[Table]) -> Group:
    """The tables, for the terminal. Texts of others have no effect on it."""
    from rich.console import Group
    from rich.table import Table as Drawn
    from rich.text import Text

    parts: list[ConsoleRenderable] = []
    for table in shown:
        drawn = Drawn(title=table.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in table.header:
            drawn.add_column(Text(name, style="dim"), overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(printable(cell), style="bold red" if isinstance(cell, Alarm) else "") for cell in row))
        parts += [drawn, Text()]
    return Group(*parts)


def _object(found: Sequence[Engine]) -> dict[str, Any]:
    """The readings as one JSON object."""
    shown = [
        {"engine": one.name, "trouble": one.trouble or None} | (asdict(one.now) if one.now is not None else {})
        for one in found
    ]
    for one in shown:
        one.pop("name", None)
        one.pop("at", None)
    return {"engines": shown}
