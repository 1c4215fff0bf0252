"""Decides which resets of vLLM empty the tiers: the resets after which the weights may differ.

vLLM updates weights through ``collective_rpc``, which has other uses too. So a call of it may make
undercroft drop blocks without need, but never keep too many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from undercroft.log import logger

if TYPE_CHECKING:
    from undercroft.connector.scheduler import SchedulerConnector


class Resets:
    """The resets of one scheduler."""

    def __init__(self, scheduler: SchedulerConnector, with_prefix_cache: bool) -> None:
        """``with_prefix_cache``: the option ``reset_with_prefix_cache``."""
        self._scheduler = scheduler
        self._with_prefix_cache = with_prefix_cache
        self._may_have_changed = False
        """Whether the weights may have changed since the last reset."""
        self._ever_changed = False
        self._keep_once = False
        """Whether the next reset belongs to a sleep during which the weights stay."""
        self._kept = False
        """Whether a sleep kept the tiers, and no reset has dropped them since."""
        self._has_warned = False

    def reset_cache(self) -> bool:
        """vLLM asks for a reset. The tiers are dropped, except for a sleep with the same weights."""
        if self._keep_once:
            self._keep_once, self._kept = False, True
            self._scheduler.forget_device()
            return True
        self._may_have_changed = self._kept = False
        return self._scheduler.reset_cache()

    def prefix_cache_is_reset(self) -> None:
        """vLLM resets its own prefix cache without a reset of the connector."""
        if self._with_prefix_cache or self._may_have_changed:
            self._keep_once = False
            self.reset_cache()
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "undercroft: vLLM's prefix cache was reset, undercroft's was not. If the weights have changed, it "
                "holds values of the old ones: call reset_prefix_cache(reset_connector=True), over HTTP "
                "/reset_prefix_cache?reset_external=true, or set reset_with_prefix_cache to true."
            )

    def sleeps(self, weights_stay: bool) -> None:
        """vLLM goes to sleep and resets its caches on the way."""
        self._keep_once = weights_stay and not self._ever_changed and not self._with_prefix_cache

    def weights_may_change(self, is_paused: bool) -> None:
        """A call that may change the weights begins, while vLLM ``is_paused`` or serves."""
        self._may_have_changed = self._ever_changed = True
        self._keep_once = False
        if is_paused and self._kept:
            # The sleep's reset kept the tiers, and perhaps no other reset follows.
            self.reset_cache()
            self._may_have_changed = True
