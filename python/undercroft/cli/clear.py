"""``undercroft clear``: remove blocks from a running engine, by their namespace or their age."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from undercroft.cli import arguments, engines, output, waiting
from undercroft.cli.confirm import add_yes, confirm
from undercroft.cli.output import say
from undercroft.cli.sockets import absolute_path
from undercroft.units import format_size

_DIGITS_MIN = 8


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "clear",
        parents=[shared],
        help="remove blocks from a running engine",
        description="Removes blocks from host memory and disk while the engine runs. No lookup finds them "
        "afterwards, not even after a restart. Blocks in use are removed when their use ends. Exit code 1 if no engine "
        "answers, it refuses, or --timeout is over; 2 without a terminal and without --yes.",
        epilog="example: undercroft clear --namespace 3f9a1c02 --erase --yes",
    )
    arguments.add_engine(parser, absolute_path)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--namespace",
        metavar="DIGITS",
        type=_digits,
        help="blocks of the namespaces whose digest begins with DIGITS (explain and inspect show digests)",
    )
    which.add_argument(
        "--older-than",
        metavar="TIME",
        type=arguments.duration,
        help="blocks that no request has used for this time, like 2h",
    )
    which.add_argument("--all", action="store_true", help="all blocks")
    parser.add_argument("--erase", action="store_true", help="erase their bytes on disk")
    add_yes(parser)
    parser.add_argument(
        "--timeout", type=arguments.seconds, default=600.0, metavar="S", help="longest wait in seconds (%(default)s)"
    )
    parser.set_defaults(run=run)


def _digits(text: str) -> str:
    if len(text) < _DIGITS_MIN or any(one not in "0123456789abcdef" for one in text.lower()):
        raise argparse.ArgumentTypeError(f"{text} is not the beginning of a digest: eight or more hexadecimal digits")
    return text.lower()


def run(args: argparse.Namespace) -> int:
    """Clear, wait, and print the number of removed blocks."""
    socket = engines.socket_of(args)
    what, named = _selection(args)
    confirm(args, f"{named} from unix://{socket}")
    begun = engines.operate(socket, {"clear": {"what": what, "erase": args.erase}})
    cleared, over = waiting.until(
        socket, {"cleared": {}}, lambda said: _is_over(said, begun["order"]), _line, args.timeout
    )
    if args.json:
        output.print_json({"socket": socket, "finished": over, **cleared})
    else:
        _print(cleared, args.erase, over)
    return 0 if over and cleared["durable"] else 1


def _selection(args: argparse.Namespace) -> tuple[Any, str]:
    """The selection of the blocks: for the engine, and as a text for people."""
    if args.namespace is not None:
        return {"namespace": args.namespace}, f"all blocks of namespace {args.namespace}"
    if args.older_than is not None:
        # The engine counts seconds in 32 bits, which is more than a century.
        return {"older_than": min(args.older_than, 2**32 - 1)}, f"blocks unused for {output.age_text(args.older_than)}"
    return "all", "all blocks"


def _is_over(said: dict[str, Any], order: int) -> bool:
    # The engine begins another operator's order only after it has ended this order.
    return said["order"] != order or not said["removing"]


def _line(said: dict[str, Any]) -> str:
    gone = said["host_blocks"] + said["disk_blocks"]
    return f"{gone} blocks removed, {said['pending']} pending"


def _print(cleared: dict[str, Any], erase: bool, over: bool) -> None:
    for tier, name in (("host", "host memory"), ("disk", "disk")):
        count, size = cleared[f"{tier}_blocks"], format_size(cleared[f"{tier}_bytes"])
        say(f"removed from {name}: {count} blocks, {size}")
    if erase:
        say(f"erased on disk: {format_size(cleared['erased_bytes'])}")
    if failed := cleared["erase_failures"]:
        say(
            f"bytes of {failed} writes were not erased: the disk cannot, or fails (undercroft status shows which), or"
            " the blocks made room for others before"
        )
    if over and cleared["pending"]:
        left = cleared["pending"]
        say(f"{left} hash blocks are in use, pinned, or on a disk that hangs, and are removed when that ends")
    if not over:
        say("not finished in time: the engine continues", file=sys.stderr)
    if not cleared["durable"]:
        say("a directory is away or takes no writes: a restart may find the blocks again", file=sys.stderr)
