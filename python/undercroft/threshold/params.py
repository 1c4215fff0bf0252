"""The request parameter ``cache_hit_threshold``: where a request may carry it, and which values are valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "cache_hit_threshold"
EXEMPT = "undercroft_exempt"
"""Key of a mark in ``extra_args`` that the frontend sets, and takes from clients: the request is never rejected."""
ALLOWED = "a number from 0 (never reject) to 1"


class InvalidThresholdError(ValueError):
    """A threshold that cannot be used. The message names the parameter, its value and the allowed values."""


def parse(value: Any, where: str = NAME) -> float:
    """The threshold in ``value``. ``where``: the parameter's name in the message of InvalidThresholdError."""
    # In Python a boolean is an int. Here it is a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidThresholdError(f"{where} = {value!r}: {type(value).__name__} instead of {ALLOWED}")
    if not 0 <= value <= 1:  # NaN is in no range.
        raise InvalidThresholdError(f"{where} = {value!r}: out of range, must be {ALLOWED}")
    return float(value)


def of_request(extra_args: Mapping[str, Any] | None, kv_transfer_params: Any = None) -> float | None:
    """The threshold of one request; None if it has none.

    A threshold in ``extra_args``, to which the HTTP field is copied, takes precedence over ``kv_transfer_params``. If
    ``kv_transfer_params`` is not given, it is the entry of this name in ``extra_args``. Both are validated. A threshold
    of None counts as absent. Raises InvalidThresholdError.
    """
    chosen = None
    if extra_args:
        if kv_transfer_params is None:
            kv_transfer_params = extra_args.get("kv_transfer_params")
        if (value := extra_args.get(NAME)) is not None:
            chosen = parse(value)
    if isinstance(kv_transfer_params, Mapping) and (value := kv_transfer_params.get(NAME)) is not None:
        nested = parse(value, f"kv_transfer_params.{NAME}")
        chosen = nested if chosen is None else chosen
    return chosen
