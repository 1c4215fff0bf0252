"""Options of one request's lookup, in vLLM's ``kv_transfer_params``. They override the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from undercroft.config import OPTIONS
from undercroft.option_values import PromotionWait

if TYPE_CHECKING:
    from undercroft.config import UndercroftConfig

NAMES = ("lookup", "lookup_timeout_ms", "promotion_wait")
"""Options of the configuration that a request may override."""

EXPLAIN = "explain"
"""Asks for `Explanations` in the response's ``kv_transfer_params``. Not an option of the configuration."""

_OPTIONS = {option.name: option for option in OPTIONS if option.name in NAMES}


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
    """Whether the response must have an explanation."""
    return isinstance(kv_transfer_params, Mapping) and kv_transfer_params.get(EXPLAIN) is True


def of_request(kv_transfer_params: Any, config: UndercroftConfig) -> LookupParams:
    """The request's own values, and the configuration's values for the rest. Raises InvalidParameterError."""
    given = _given(kv_transfer_params)
    wait: PromotionWait = given.get("promotion_wait", config.promotion_wait)
    return LookupParams(
        blocking=given.get("lookup", config.lookup) == "blocking",
        timeout_s=given.get("lookup_timeout_ms", config.lookup_timeout_ms) / 1e3,
        wait_ms=None if wait.base_ms is None else (wait.base_ms, wait.per_1k_tokens_ms),
        planned=wait.planned,
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
