"""``undercroft inspect URL``: the contents of a remote store."""

from __future__ import annotations

import argparse
from typing import Any

from undercroft import descriptions
from undercroft.cli import output, waiting
from undercroft.cli.output import say
from undercroft.errors import ConfigError
from undercroft.units import format_size


def run(args: argparse.Namespace) -> int:
    """Print the namespaces of the store. Raises ConfigError, UndercroftError."""
    from undercroft import _core

    for name in ("verify", "drop", "diff", "model"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is for a directory of the disk tier, not for a remote store")
    found: dict[str, Any] = waiting.until_interrupted(
        lambda: _core.remote_contents(args.directory, any_owner=args.remote_any_owner)
    )
    for space in found["namespaces"]:
        text = space["description"]
        space["description"] = descriptions.parsed(text) or text if text is not None else None
    if args.json:
        output.print_json(found)
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    say(f"{found['objects']} objects, {format_size(found['bytes'])}")
    if found["other_objects"]:
        say(f"{found['other_objects']} other objects, which undercroft neither reads nor removes")
    if not found["namespaces"]:
        return
    say()
    output.print_table(
        ("namespace", "model", "dtype", "TP", "block", "vLLM", "objects", "bytes", "oldest", "newest"),
        [
            (
                space["digest"][:12],
                *descriptions.summary(space["description"] if isinstance(space["description"], dict) else {}),
                space["objects"],
                format_size(space["bytes"]),
                output.age_text(space["oldest_s"]),
                output.age_text(space["newest_s"]),
            )
            for space in found["namespaces"]
        ],
    )
