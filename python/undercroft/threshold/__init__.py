"""The hit threshold: rejects requests with too few cached tokens, so that a router can send them to another instance.

`undercroft.vllm_patches` lets vLLM reject requests. The scheduler's connector makes a `HitThreshold` with
`for_connector`, asks `HitThreshold.check` when a lookup's answer is final, and offers `HitThreshold.collect` as
``take_threshold_rejects``, which the patched scheduler calls.
"""

from __future__ import annotations

from collections.abc import Collection

from undercroft.option_values import CLIENT_FIELDS
from undercroft.threshold.params import NAME, InvalidThresholdError
from undercroft.threshold.policy import HitThreshold, Rejection, logger

__all__ = [
    "HitThreshold",
    "InvalidThresholdError",
    "Rejection",
    "ThresholdUnavailableError",
    "for_connector",
]


class ThresholdUnavailableError(RuntimeError):
    """A threshold is configured, but undercroft cannot patch this vLLM to reject requests."""


def for_connector(
    global_threshold: float, problem: str | None, client_fields: Collection[str] = CLIENT_FIELDS
) -> HitThreshold:
    """The threshold for a scheduler's connector; ``global_threshold`` in [0, 1] is for requests without one.

    ``problem``: the reason why this vLLM cannot reject requests; None if it can. With a problem this raises
    ThresholdUnavailableError if a threshold is configured. Otherwise it logs that requests' thresholds are ignored.
    ``client_fields``: the option.
    """
    if problem is not None:
        if global_threshold > 0:
            raise ThresholdUnavailableError(
                f"undercroft: {NAME} = {global_threshold:g} is configured, but cannot work: {problem}. "
                f"Set {NAME} to 0, or use a vLLM version that undercroft supports."
            )
        logger.warning("undercroft: %s of requests is ignored: %s. All other features work.", NAME, problem)
    return HitThreshold(
        global_threshold,
        problem,
        requests_choose="threshold" in client_fields,
        reports_figures="explain" in client_fields,
    )
