"""Types of arguments that several subcommands take; each refuses a wrong value and names the allowed ones."""

from __future__ import annotations

import argparse
import math
import urllib.parse
from collections.abc import Callable

from undercroft.model.layers import DTYPE_BYTES
from undercroft.remote_url import without_credentials
from undercroft.units import DURATION_FORMAT, SIZE_FORMAT, parse_duration, parse_size


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}. Allowed: {SIZE_FORMAT}") from None


def size(text: str) -> int:
    """Bytes, above 0."""
    found = _size(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: zero. Allowed: {SIZE_FORMAT}, above 0")
    return found


def sizes(text: str) -> list[int]:
    """Sizes separated by commas."""
    return [size(part) for part in text.split(",")]


def sizes_or_zero(text: str) -> list[int]:
    """Sizes separated by commas, each of which may be 0."""
    return [_size(part) for part in text.split(",")]


def rate(text: str) -> int:
    """Bytes a second, above 0, such as "3GB" or "3GB/s"."""
    return size(text.removesuffix("/s"))


def duration(text: str) -> int:
    """Seconds of a time such as "3d"."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}. Allowed: {DURATION_FORMAT}") from None


def whole(low: int, high: int) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def number(low: float, high: float, noun: str = "number") -> Callable[[str], float]:
    """A number from ``low`` to ``high``. ``noun``: the name of such a number, for messages."""

    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a {noun} from {low:g} to {high:g}")
        return found

    return parse


seconds = number(0.1, 86_400, "number of seconds")
"""A time in seconds, from 0.1 to a day."""


def url(text: str) -> str:
    """The address of a vLLM, without "/v1" and slashes at its end."""
    try:
        parts = urllib.parse.urlsplit(text)
        possible = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        possible = False
    if "@" in text:
        raise argparse.ArgumentTypeError(
            f"{without_credentials(text)} has credentials, which messages would show. Leave them out"
        )
    if not possible:
        raise argparse.ArgumentTypeError(
            f"{without_credentials(text)} is no address of a vLLM. Allowed: http://host:port, or https://..."
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def add_owner(parser: argparse.ArgumentParser) -> None:
    """Add the option of a remote store that a command opens itself."""
    parser.add_argument(
        "--remote-any-owner",
        action="store_true",
        help="as the option remote_any_owner: use a directory that belongs to other users, or that they may write",
    )


def add_engine(parser: argparse.ArgumentParser, path: Callable[[str], str]) -> None:
    """Add the arguments that select a running engine."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--socket", type=path, metavar="PATH", help="socket of the engine (default: the only engine of this user)"
    )
    place.add_argument("--disk-path", metavar="DIR", help="the engine that has this directory open")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about vLLM's KV cache of a model."""
    types = ("auto", *DTYPE_BYTES)
    parser.add_argument(
        "--tensor-parallel-size", type=whole(1, 1024), default=1, metavar="N", help="as given to vLLM (%(default)s)"
    )
    parser.add_argument(
        "--block-size", type=whole(1, 1 << 20), metavar="TOKENS", help="as given to vLLM (16, its default on GPUs)"
    )
    parser.add_argument(
        "--dtype", choices=types[:4], default="auto", help="as given to vLLM; auto: that of the weights (%(default)s)"
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=types, default="auto", help="as given to vLLM; auto: the model's (%(default)s)"
    )
    parser.add_argument(
        "--mamba-ssm-cache-dtype",
        choices=types[:4],
        default="auto",
        help="as given to vLLM, for models with states (%(default)s)",
    )
