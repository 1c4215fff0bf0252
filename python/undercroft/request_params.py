"""Fields of one request in vLLM's ``kv_transfer_params``, and the part of them that the configuration allows.

Whoever may send vLLM a request chooses these fields. So a request may ask for less waiting than the configuration
allows, never for more, and `UndercroftConfig.client_fields` names the fields that tell something about the cache.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from undercroft import hints
from undercroft.config import OPTIONS
from undercroft.option_values import PromotionWait
from undercroft.threshold import params as threshold

if TYPE_CHECKING:
    from undercroft.config import UndercroftConfig

NAMES = ("lookup", "lookup_timeout_ms", "promotion_wait")
"""Options of the configuration that a request may lower."""

EXPLAIN = "explain"
"""Asks for `Explanations` in the response's ``kv_transfer_params``. Not an option of the configuration."""

KNOWN = (*NAMES, EXPLAIN, hints.NAME, threshold.NAME, threshold.ANSWER)
"""All fields of undercroft. Other connectors have fields of their own beside them."""

_OPTIONS = {option.name: option for option in OPTIONS if option.name in NAMES}
_NEAR = 0.75
"""Least similarity (of `difflib`) of a misspelled field. No field of vLLM's connectors comes near to it."""
_FIELDS_MAX = 32
_LENGTH_MAX = 32


class InvalidParameterError(ValueError):
    """A parameter that cannot be used. The message names the parameter, its value and the allowed values."""

    def __init__(self, name: str, value: Any, reason: str) -> None:
        allowed = "true or false" if name == EXPLAIN else _OPTIONS[name].allowed
        super().__init__(f"kv_transfer_params.{name} = {value!r}: {reason}. Allowed: {allowed}.")
        self.name = name


@dataclass(frozen=True, slots=True)
class LookupParams:
    """The options of one request's lookup."""

    blocking: bool
    """Whether the lookup waits for the disk in the scheduler. If not, its answer is "later" meanwhile."""
    timeout_s: float
    """Longest wait of a blocking lookup."""
    wait_ms: tuple[float, float] | None
    """Longest wait for the disk in milliseconds: a base, and an addition for every 1,000 tokens. None: no limit."""
    planned: bool = False
    """Whether to wait only while loading takes less time than computing. Applies if ``wait_ms`` is None."""
    capped: tuple[str, ...] = ()
    """Parameters of the request that asked for more waiting than the configuration allows, and got what it allows."""

    def at_once(self) -> LookupParams:
        """These options without any wait: the hit then ends with the part in host memory."""
        return replace(self, blocking=False, wait_ms=(0.0, 0.0))


def is_brought(kv_transfer_params: Any) -> bool:
    """Whether a P/D connector will bring the request's blocks from a prefill instance. Then it clears the parameter."""
    return bool(kv_transfer_params and kv_transfer_params.get("do_remote_prefill"))


def check(kv_transfer_params: Any) -> None:
    """Raise InvalidParameterError if a parameter of undercroft has an impossible value. Ignores other parameters."""
    _given(kv_transfer_params)
    if isinstance(kv_transfer_params, Mapping):
        value = kv_transfer_params.get(EXPLAIN)
        if value is not None and not isinstance(value, bool):
            raise InvalidParameterError(EXPLAIN, value, f"{type(value).__name__} instead of true or false")


def wants_explanation(kv_transfer_params: Any) -> bool:
    """Whether the request asks for an explanation in its response."""
    return isinstance(kv_transfer_params, Mapping) and kv_transfer_params.get(EXPLAIN) is True


def of_request(kv_transfer_params: Any, config: UndercroftConfig) -> LookupParams:
    """The request's own values as far as the configuration allows them, and the configuration's values for the rest.

    Raises InvalidParameterError.
    """
    given = _given(kv_transfer_params)
    allowed = {name: getattr(config, name) for name in NAMES}
    values = allowed | {name: _lower(name, value, allowed[name]) for name, value in given.items()}
    wait: PromotionWait = values["promotion_wait"]
    return LookupParams(
        blocking=values["lookup"] == "blocking",
        timeout_s=values["lookup_timeout_ms"] / 1e3,
        wait_ms=None if wait.base_ms is None else (wait.base_ms, wait.per_1k_tokens_ms),
        planned=wait.planned,
        capped=tuple(name for name, value in given.items() if values[name] != value),
    )


def misspelled(kv_transfer_params: Any) -> dict[str, str]:
    """Fields that undercroft does not know but that resemble one of its own, each with the nearest name."""
    if not isinstance(kv_transfer_params, Mapping):
        return {}
    found = {}
    for name in list(kv_transfer_params)[:_FIELDS_MAX]:
        if isinstance(name, str) and name not in KNOWN and (near := _nearest(name[:_LENGTH_MAX])):
            found[name[:_LENGTH_MAX]] = near
    return found


@functools.lru_cache(maxsize=256)
def _nearest(name: str) -> str | None:
    # Other connectors send the same names with each request.
    near = difflib.get_close_matches(name.lower(), KNOWN, n=1, cutoff=_NEAR)
    return near[0] if near else None


def _lower(name: str, asked: Any, allowed: Any) -> Any:
    """The value of a request that may wait less than the configuration allows, and not more."""
    if name == "lookup":
        return asked if allowed == "blocking" else allowed
    if name == "lookup_timeout_ms":
        return min(asked, allowed)
    return _shorter(asked, allowed)


def _shorter(asked: PromotionWait, allowed: PromotionWait) -> PromotionWait:
    """A planned wait and one of a set time cannot be compared, so the configured one of the two applies."""
    is_none = asked.base_ms is not None and asked.base_ms + asked.per_1k_tokens_ms == 0
    is_unlimited = allowed.base_ms is None and not allowed.planned
    if is_none or is_unlimited:
        return asked
    if asked.base_ms is None or allowed.base_ms is None:
        return allowed
    return PromotionWait(
        min(asked.base_ms, allowed.base_ms), min(asked.per_1k_tokens_ms, allowed.per_1k_tokens_ms), planned=False
    )


def _given(kv_transfer_params: Any) -> dict[str, Any]:
    if not isinstance(kv_transfer_params, Mapping):
        return {}
    given = {}
    for name, option in _OPTIONS.items():
        value = kv_transfer_params.get(name)
        if value is None:
            continue
        try:
            given[name] = option.parse(value)
        except ValueError as error:
            raise InvalidParameterError(name, value, str(error)) from None
    return given
