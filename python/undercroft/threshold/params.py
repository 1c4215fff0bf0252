"""The request parameters of the hit threshold and of its answer: where a request may carry them, and which values are
valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from undercroft.option_values import choice

_T = TypeVar("_T")

NAME = "cache_hit_threshold"
EXEMPT = "undercroft_exempt"
"""Key of a mark in ``extra_args`` that the frontend sets, and takes from clients: the request is never rejected."""
ALLOWED = "a number from 0 (never reject) to 1"

ANSWER = "cache_hit_threshold_answer"
FINISH_REASON, ERROR = "finish_reason", "error"
"""The answers to a rejected request: a success with the finish reason, or an HTTP status and an error object."""


class InvalidThresholdError(ValueError):
    """A parameter that cannot be used. The message names the parameter, its value and the allowed values."""

    def __init__(self, message: str, name: str = NAME) -> None:
        super().__init__(message)
        self.name = name


def parse(value: Any, where: str = NAME) -> float:
    """The threshold in ``value``. ``where``: the parameter's name in the message of InvalidThresholdError."""
    # In Python a boolean is an int. Here it is a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidThresholdError(f"{where} = {value!r}: {type(value).__name__} instead of {ALLOWED}")
    if not 0 <= value <= 1:  # NaN is in no range.
        raise InvalidThresholdError(f"{where} = {value!r}: out of range, must be {ALLOWED}")
    return float(value)


def parse_answer(value: Any, where: str = ANSWER) -> str:
    """The answer to a rejected request in ``value``; as `parse`."""
    try:
        return choice(FINISH_REASON, ERROR)(value)
    except ValueError as error:
        allowed = f'"{FINISH_REASON}" or "{ERROR}"'
        raise InvalidThresholdError(f"{where} = {value!r}: {error}. Allowed: {allowed}.", ANSWER) from None


def of_request(extra_args: Mapping[str, Any] | None, kv_transfer_params: Any = None) -> float | None:
    """The threshold of one request; None if it has none.

    A threshold in ``extra_args``, to which the HTTP field is copied, takes precedence over ``kv_transfer_params``. If
    ``kv_transfer_params`` is not given, it is the entry of this name in ``extra_args``. Both are validated. A threshold
    of None counts as absent. Raises InvalidThresholdError.
    """
    return _chosen(NAME, parse, extra_args, kv_transfer_params)


def answer_of_request(extra_args: Mapping[str, Any] | None) -> str | None:
    """The answer that one request chooses for its rejection; None if it chooses none. As `of_request`."""
    return _chosen(ANSWER, parse_answer, extra_args, None)


def _chosen(
    name: str, parse: Callable[[Any, str], _T], extra_args: Mapping[str, Any] | None, kv_transfer_params: Any
) -> _T | None:
    chosen = None
    if extra_args:
        if kv_transfer_params is None:
            kv_transfer_params = extra_args.get("kv_transfer_params")
        if (value := extra_args.get(name)) is not None:
            chosen = parse(value, name)
    if isinstance(kv_transfer_params, Mapping) and (value := kv_transfer_params.get(name)) is not None:
        nested = parse(value, f"kv_transfer_params.{name}")
        chosen = nested if chosen is None else chosen
    return chosen
