"""Output of the subcommands: one JSON object, or aligned text."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any, TextIO

from undercroft.errors import ConfigError, StoreError, UndercroftError, cause
from undercroft.printable import printable

NARROW_ROWS = 8
"""Most rows of a table, the header included, that are shown cell by cell on a narrow terminal."""


class CommandError(UndercroftError):
    """A command has no result. The message has the reason."""


def described(error: Exception) -> tuple[int, str] | None:
    """Exit code and message of an error that a command may end with; None if it is a fault of this program."""
    if not isinstance(error, UndercroftError | OSError | ImportError):
        return None
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {cause(error)}"
    return 2 if isinstance(error, ConfigError | StoreError) else 1, text.removeprefix("undercroft: ")


def coloured(text: str, colour: str) -> str:
    """The text in one of the terminal's colours; plain if stdout is no terminal or NO_COLOR is set (no-color.org)."""
    return f"\033[{colour}m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def say(text: str = "", *, mark: str = "", file: TextIO | None = None, flush: bool = False) -> None:
    """Print a line, on stdout unless there is a ``file``. Names of a client or a store in it are `printable`.

    ``mark``: text of this program before the line, perhaps `coloured`.
    """
    print(mark + printable(text), file=file, flush=flush)


def show_progress(text: str) -> None:
    """Replace the last line of the terminal on stderr by this text."""
    print(f"\r\033[K{printable(text)}", end="", file=sys.stderr, flush=True)


def clear_screen() -> None:
    """Begin at the upper left of an empty screen, if stdout is a terminal."""
    print("\033[H\033[2J" if sys.stdout.isatty() else "", end="")


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, indent=2))


def print_fields(fields: Mapping[str, Any]) -> None:
    """Names and values in two columns. Lists and mappings are left out. An absent value is a dash."""
    shown = {name: text(value) for name, value in fields.items() if not isinstance(value, list | dict)}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        say(f"{name:<{width}}  {value}")


def print_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns as wide as their widest cell. On a terminal that is too narrow for them, each cell has a line."""
    cells = [list(header)] + [[text(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    # Many rows are easier to compare in lines that the terminal wraps.
    if len(cells) <= NARROW_ROWS and sys.stdout.isatty() and max(map(len, lines)) > get_terminal_size().columns:
        for number, row in enumerate(cells[1:]):
            if number:
                say()
            print_fields(dict(zip(header, row, strict=True)))
    else:
        for line in lines:
            say(line)


def text(value: Any) -> str:
    """A value for people: a small fraction with four significant digits, others with three decimals; None is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.4g}"
    return printable(str(value))


def count(number: int, noun: str) -> str:
    """A number and its noun, whose plural ends in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def age_text(seconds: float | None) -> str:
    """A number of seconds in the largest sensible unit."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
