"""``undercroft pin``: keeps the blocks of prompts in the tiers for a time."""

from __future__ import annotations

import argparse

from undercroft import hints
from undercroft.cli import pins
from undercroft.cli.arguments import seconds


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "pin",
        parents=[shared],
        help="keep the blocks of prompts in host memory or on disk for a time",
        description=f"Keeps the cached blocks of prompts in host memory or on disk. {pins.DESCRIPTION}",
        epilog="example: undercroft pin --url http://127.0.0.1:8000 prompts.jsonl",
    )
    pins.add_arguments(parser)
    parser.add_argument(
        "--ttl",
        type=seconds,
        default=hints.DEFAULT_TTL_S,
        metavar="SECONDS",
        help="a pin ends after this time without a use (%(default)g)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pin the cached blocks of each prompt."""
    return pins.run(args, "pin", {"ttl_s": max(1.0, args.ttl)})
