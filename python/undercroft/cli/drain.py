"""``undercroft drain``: have a running engine write everything and take nothing new, before maintenance."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from undercroft.cli import arguments, engines, output, waiting
from undercroft.cli.output import say
from undercroft.cli.sockets import absolute_path
from undercroft.units import format_size


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "drain",
        parents=[shared],
        help="prepare a running engine for maintenance",
        description="Prepares an engine for maintenance: it starts no further save and no further read from disk or "
        "the remote store, writes the pending blocks to both, and serves hits in host memory. Waits until no write is "
        "pending. A restart or --cancel ends the drain. Exit code 1 if no engine answers, or --timeout is over.",
        epilog="example: undercroft drain --timeout 120",
    )
    arguments.add_engine(parser, absolute_path)
    parser.add_argument("--cancel", action="store_true", help="end the drain: the engine saves and reads again")
    parser.add_argument(
        "--timeout", type=arguments.seconds, default=300.0, metavar="S", help="longest wait in seconds (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Drain and wait, or end an earlier drain."""
    socket = engines.socket_of(args)
    drained = engines.operate(socket, {"drain": {"cancel": args.cancel}})
    over = True
    if not args.cancel:
        drained, over = waiting.until(socket, {"drained": {}}, _is_over, _line, args.timeout)
    if args.json:
        output.print_json({"socket": socket, **drained})
    elif args.cancel:
        say("the engine saves and reads again")
    elif drained["clean"]:
        say("drained: everything is written, and the engine begins no save and no read")
    elif over:
        raise output.CommandError("another undercroft drain --cancel has ended the draining")
    else:
        say(f"not drained in time: {_line(drained)}; the engine continues", file=sys.stderr)
    return 0 if args.cancel or drained["clean"] else 1


def _is_over(said: dict[str, Any]) -> bool:
    return bool(said["clean"]) or not said["draining"]


def _line(said: dict[str, Any]) -> str:
    queued = format_size(said["queued_bytes"])
    line = f"{queued} wait to be written, {said['operations']} operations and {said['saves']} saves in progress"
    if objects := said.get("remote_writes"):
        line += f", {objects} objects not yet in the remote store"
    return line
