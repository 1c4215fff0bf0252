"""The hit threshold: requests of which too little is cached are given back unserved.

The plugin calls `install` in every process; the scheduler's connector makes a `HitThreshold` with `for_connector`, asks
`HitThreshold.check` when a lookup's answer is final, and offers `HitThreshold.take` as ``take_threshold_rejects``,
by which the hooks in vLLM find it.
"""

from __future__ import annotations

from undercroft.threshold.hooks import install, unavailable
from undercroft.threshold.params import NAME, InvalidThresholdError
from undercroft.threshold.policy import HitThreshold, Rejection, logger

__all__ = [
    "HitThreshold",
    "InvalidThresholdError",
    "Rejection",
    "ThresholdUnavailableError",
    "for_connector",
    "install",
]


class ThresholdUnavailableError(RuntimeError):
    """A threshold is configured, but this vLLM cannot be told to give requests back."""


def for_connector(global_threshold: float) -> HitThreshold:
    """The threshold for a scheduler's connector; ``global_threshold`` in [0, 1] is for requests that carry none.

    Where this vLLM's internals are unknown: raises ThresholdUnavailableError if a threshold is configured, else says
    once that requests' thresholds are ignored.
    """
    install()
    problem = unavailable()
    if problem is not None:
        if global_threshold > 0:
            raise ThresholdUnavailableError(
                f"undercroft: {NAME} = {global_threshold:g} is configured, but cannot work: {problem}. "
                f"Set {NAME} to 0, or use a vLLM version that undercroft supports."
            )
        logger.warning("undercroft: %s of requests is ignored: %s. All else works.", NAME, problem)
    return HitThreshold(global_threshold, problem)
