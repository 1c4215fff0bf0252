"""Checks the option ``key_file`` before the core reads the file."""

from __future__ import annotations

import re
from pathlib import Path


def is_key(text: str) -> bool:
    """Whether a text is a key for encryption in the form that `openssl rand -hex 32` prints."""
    return re.fullmatch(r"\s*[0-9a-fA-F]{64}\s*", text) is not None


def check_key_file(value: object) -> str:
    """The absolute path; empty for no file. Raises ValueError for a key in place of a path: messages would show it."""
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of text")
    if is_key(value):
        raise ValueError("a key instead of the path of a file with keys")
    return str(Path(value).expanduser().absolute()) if value else ""
