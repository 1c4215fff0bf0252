"""Prompts in a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from undercroft.errors import ConfigError, cause

ALLOWED = 'text in quotes, a list of token ids, or an object with "prompt" or "messages"'


def add_file(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The argument that names the file."""
    parser.add_argument(
        "file",
        type=Path,
        nargs=nargs,
        help="prompts, one in each line: JSON text, a JSON list of token ids, or an object of fields of a completion "
        'or chat request ("-": standard input)',
    )


def read(file: Path, is_possible: Callable[[Any], bool], allowed: str) -> list[tuple[int, Any]]:
    """The number and the value of each line that is not empty. Raises ConfigError."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the file cannot be read ({cause(error)})") from None
    found = []
    # JSON text may hold the other characters at which `str.splitlines` splits.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            raise ConfigError(f"{file}, line {number}: it is not JSON; allowed: {allowed}") from None
        if not is_possible(value):
            raise ConfigError(f"{file}, line {number}: allowed: {allowed}")
        found.append((number, value))
    if not found:
        raise ConfigError(f"{file}: the file has no line; allowed: {allowed}")
    return found


def is_prompt(line: Any) -> bool:
    """Whether a line is a prompt."""
    if isinstance(line, dict):
        return "prompt" in line or "messages" in line
    is_ids = isinstance(line, list) and line and all(isinstance(one, int) for one in line)
    return bool(isinstance(line, str) or is_ids)
