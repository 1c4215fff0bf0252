"""Parsers of options' values: from JSON, and from the text of an environment variable.

Each function raises ValueError with the reason. The caller adds the option's name and its allowed values.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercroft.units import Amount, parse_amount, parse_duration, parse_size


@dataclass(frozen=True, slots=True)
class PromotionWait:
    """The limit of a lookup's wait for blocks that are on disk only.

    ``planned``: the lookup waits while loading takes less time than computing, by measurement. Otherwise it waits for
    ``base_ms`` plus ``per_1k_tokens_ms`` for each 1,000 tokens of the lookup. If ``base_ms`` is None, it waits until
    all blocks are in host memory.
    """

    base_ms: float | None = None
    per_1k_tokens_ms: float = 0.0
    planned: bool = False


def nearest(key: str, known: Sequence[str]) -> str:
    """The known word nearest to ``key``; empty if none is near."""
    return next(iter(difflib.get_close_matches(key, known, n=1)), "")


def did_you_mean(key: str, known: Sequence[str]) -> str:
    """A hint that names the known word nearest to ``key``; empty if none is near."""
    near = nearest(key, known)
    return f" (did you mean {near!r}?)" if near else ""


def choice(*allowed: str) -> Callable[[Any], str]:
    """One of these words."""

    def parse(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{type(value).__name__} instead of text")
        if value not in allowed:
            raise ValueError(f"not one of the allowed words{did_you_mean(value.lower(), allowed)}")
        return value

    return parse


CLIENT_FIELDS = ("threshold", "explain", "hints")
"""Words of the option ``client_fields``."""


def client_fields(value: Any) -> tuple[str, ...]:
    """ "none", or some of `CLIENT_FIELDS`."""
    if value == "none":
        return ()
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        raise ValueError(f"{type(words).__name__} instead of a word or a list of words")
    one = choice(*CLIENT_FIELDS)
    return tuple(sorted({one(word) for word in words}, key=CLIENT_FIELDS.index))


def integer(low: int, high: int) -> Callable[[Any], int]:
    """A whole number in this range."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{type(value).__name__} instead of a whole number")
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return parse


def number(low: float, high: float) -> Callable[[Any], float]:
    """A number in this range."""

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{type(value).__name__} instead of a number")
        # The comparison comes first: a huge integer has no float.
        if not low <= value <= high:
            raise ValueError("out of range")
        return float(value)

    return parse


def or_none(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A parser that accepts null, and otherwise calls ``parse``."""
    return lambda value: None if value is None else parse(value)


def boolean(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{type(value).__name__} instead of true or false")
    return value


def plain_text(value: Any) -> str:
    """Text."""
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of text")
    return value


def directory(value: Any) -> str:
    """An absolute path, since other processes use it. An empty path stays empty."""
    text = plain_text(value)
    return str(Path(text).expanduser().absolute()) if text else ""


def positive_amount(value: Any) -> Amount:
    """A size or a percentage, above zero."""
    amount = parse_amount(value)
    if amount.size == 0:
        raise ValueError("zero")
    return amount


_REMOTE_OBJECT_MIN = 1 << 20
_REMOTE_OBJECT_MAX = 64 << 20


def remote_object(value: Any) -> int:
    """A size that an object of the remote store may have."""
    size = parse_size(value)
    if not _REMOTE_OBJECT_MIN <= size <= _REMOTE_OBJECT_MAX:
        raise ValueError("out of range")
    return size


_CENTURY_S = 36_525 * 86_400


def duration(least: int) -> Callable[[Any], int]:
    """Seconds, at least ``least`` and at most a century."""

    def parse(value: Any) -> int:
        seconds = parse_duration(value)
        if not least <= seconds <= _CENTURY_S:
            raise ValueError("out of range")
        return seconds

    return parse


SHADOWS_MAX = 4
"""Most sizes of the option ``shadow``: each size has series of its own in the metrics."""


def sizes(value: Any) -> tuple[int, ...]:
    """A size or a list of them."""
    sizes = value if isinstance(value, list | tuple) else (value,)
    if len(sizes) > SHADOWS_MAX:
        raise ValueError(f"{len(sizes)} sizes")
    found = tuple(parse_size(size) for size in sizes)
    if 0 in found:
        raise ValueError("zero")
    return found


def text_sizes(text: str) -> Any:
    """Sizes with commas between them."""
    return [part for part in text.split(",") if part]


def text_words(text: str) -> Any:
    """Words with commas between them."""
    words = [word.strip() for word in text.split(",")]
    return words[0] if len(words) == 1 else words


def paths(value: Any) -> tuple[str, ...]:
    """Absolute directories without repetition."""
    paths = (value,) if isinstance(value, str) else value
    if not isinstance(paths, (list, tuple)):
        raise ValueError(f"{type(value).__name__} instead of a path or a list of paths")
    for path in paths:
        if not isinstance(path, str):
            raise ValueError(f"the list holds {type(path).__name__} instead of a path")
        if not path.strip() or "\0" in path:
            raise ValueError("an empty or impossible path")
    expanded = tuple(str(Path(path).expanduser().absolute()) for path in paths)
    if len(set(expanded)) != len(expanded):
        raise ValueError("the same directory twice")
    return expanded


def server(value: Any) -> str:
    """The address of a Unix socket."""
    text = plain_text(value)
    path = text.removeprefix("unix://")
    if text and (path == text or not path.startswith("/")):
        raise ValueError("no address of a Unix socket")
    return text


def promotion_wait(value: Any) -> PromotionWait:
    """A word, or an object with milliseconds."""
    if value == "planned":
        return PromotionWait(planned=True)
    if value == "complete":
        return PromotionWait()
    if value == "best_effort":
        return PromotionWait(0.0, 0.0)
    if not isinstance(value, dict):
        raise ValueError("neither of the words nor an object")
    known = ("base_ms", "per_1k_tokens_ms")
    for key in value:
        if key not in known:
            raise ValueError(f"unknown key {key!r}{did_you_mean(str(key), known)}")
    numbers = {}
    for key in known:
        try:
            numbers[key] = number(0, 3_600_000)(value.get(key, 0))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return PromotionWait(numbers["base_ms"], numbers["per_1k_tokens_ms"])


def text_bool(text: str) -> bool:
    """True or false in the spellings that people use in the environment."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("neither true nor false")


def text_number(text: str) -> int | float:
    """A number in digits."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError("not a number") from None


def text_paths(text: str) -> Any:
    """Paths with colons between them, or a JSON list."""
    return json.loads(text) if text.lstrip().startswith("[") else [path for path in text.split(os.pathsep) if path]


def text_object(text: str) -> Any:
    """A JSON object, or a word."""
    return json.loads(text) if text.lstrip().startswith("{") else text
