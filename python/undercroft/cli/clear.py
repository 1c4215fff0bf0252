"""``undercroft clear``: drop what a running engine has cached, in memory and on disk."""

from __future__ import annotations

import argparse
import string
import sys
import time

from undercroft.cli import arguments, engines, output
from undercroft.cli.serve import absolute_path

PAUSE_S = 0.05


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "clear",
        parents=[shared],
        help="drop what a running engine has cached",
        description="Drops the blocks of a namespace, or all, in `undercroft serve` or the engine inside a vLLM, which "
        "goes on serving. Nothing of them is found when the command ends, nor after a restart. Their bytes stay on the "
        "device until others overwrite them. `undercroft inspect` and `status` show namespaces. Exit code 1 if no "
        "engine answers, or a directory cannot be written to.",
        epilog="example: undercroft clear --namespace 7f3a",
    )
    arguments.add_engine(parser, absolute_path)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--namespace",
        type=_prefix,
        metavar="DIGEST",
        help="the namespaces whose digests begin so (4 characters or more)",
    )
    which.add_argument("--all", action="store_true", help="every namespace")
    parser.add_argument(
        "--timeout",
        type=arguments.seconds,
        default=10.0,
        metavar="S",
        help="longest wait until the directories say so, in seconds (%(default)s)",
    )
    parser.set_defaults(run=run)


def _prefix(text: str) -> str:
    found = text.lower()
    if not 4 <= len(found) <= 64 or set(found) - set(string.hexdigits):
        raise argparse.ArgumentTypeError(f"{text} is not the beginning of a digest: 4 to 64 hexadecimal characters")
    return found


def run(args: argparse.Namespace) -> int:
    """Clear, and wait until that is durable."""
    socket = engines.socket_of(args)
    order = {"clear": {"namespace": args.namespace or ""}}
    cleared, end = 0, time.monotonic() + args.timeout
    while True:
        said = engines.operate(socket, order)
        cleared += said["cleared"]
        is_durable = not said["pending"] and not said["failed"]
        if not said["cleared"] and (is_durable or said["failed"] or time.monotonic() > end):
            break
        if not said["cleared"]:
            time.sleep(PAUSE_S)
    if args.json:
        output.print_json({"socket": socket, "cleared": cleared, "durable": is_durable})
    else:
        print(f"cleared {cleared} namespace{'s' if cleared != 1 else ''} of unix://{socket}")
    if not is_durable:
        print(
            "undercroft: a directory does not say so yet: after a crash, what was cleared may come back until it does; "
            "see undercroft status",
            file=sys.stderr,
        )
    return 0 if is_durable else 1
