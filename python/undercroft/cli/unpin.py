"""``undercroft unpin``: ends the pins of prompts."""

from __future__ import annotations

import argparse

from undercroft.cli import pins


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "unpin",
        parents=[shared],
        help="end the pins of prompts, or the pin of a name",
        description=f"Ends the pins of prompts. {pins.DESCRIPTION}",
        epilog="example: undercroft unpin --url http://127.0.0.1:8000 prompts.jsonl",
    )
    pins.add_arguments(parser, file="?")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Release each prompt."""
    return pins.run(args, "release", {})
