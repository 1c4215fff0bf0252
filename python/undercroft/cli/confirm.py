"""The question before a command removes something: on a terminal it is asked, without one ``--yes`` has to be given."""

from __future__ import annotations

import argparse
import sys

from undercroft.cli.output import CommandError
from undercroft.errors import ConfigError
from undercroft.printable import printable


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add ``--yes``."""
    parser.add_argument(
        "--yes", action="store_true", help="remove without a question; needed where there is no terminal to ask on"
    )


def confirm(args: argparse.Namespace, what: str) -> None:
    """Have the operator confirm that ``what`` is removed.

    Raises ConfigError if there is no terminal and no ``--yes``, and CommandError if the operator says no.
    """
    if args.yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"nothing was removed: there is no terminal to ask on; give --yes to remove {what}")
    if input(printable(f"Remove {what}? [y/N] ")).strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was removed")
