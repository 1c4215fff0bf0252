"""Resets and changes of the weights: what vLLM's calls mean for the tiers.

What is saved after a change of the weights belongs to no namespace that others share: neither another vLLM nor a
restart may find it. vLLM changes weights through ``collective_rpc``, which has other uses too. So a call of it may make
undercroft share less than it could, but never too much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from undercroft.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from undercroft._core import Session
    from undercroft.connector.kv_origin import KvOrigin

RESET_TIMEOUT_S = 1.0
"""Longest wait until the disk or the server confirms a reset. vLLM runs no step during this wait."""


def drop_namespace(session: Session) -> None:
    """Drop everything of a vLLM's namespace, and warn if nothing confirms this in time.

    vLLM is told of success in both cases: after False it would stay paused. From this call on, the session shares with
    no other session and finds no earlier block.
    """
    if not session.reset(RESET_TIMEOUT_S):
        logger.warning(
            "undercroft: a reset was not confirmed within %g s: the server is away or late, or the disk failed. "
            "This vLLM finds no earlier blocks. Others with the same model do until the reset is confirmed.",
            RESET_TIMEOUT_S,
        )


class Tiers(Protocol):
    """What resets change: one scheduler's tiers."""

    @property
    def origin(self) -> KvOrigin:
        """The origin of the KV on the device."""

    def reset_cache(self) -> bool:
        """Drop the tiers."""

    def forget_device(self) -> None:
        """Save none of the blocks that the device holds now."""

    def use_namespace(self, description: str | None) -> None:
        """Use another namespace from now on; with None a private one."""


class Resets:
    """The resets and the weights of one scheduler."""

    def __init__(
        self,
        scheduler: Tiers,
        with_prefix_cache: bool,
        describe_version: Callable[[str], str] | None = None,
    ) -> None:
        """``with_prefix_cache``: the option ``reset_with_prefix_cache``. ``describe_version``: with the option
        ``share_weight_versions``, the namespace's description for the weights that have this name."""
        self._scheduler = scheduler
        self._with_prefix_cache = with_prefix_cache
        self._describe_version = describe_version
        self._may_have_changed = False
        """Whether the weights may have changed since the last reset."""
        self._ever_changed = False
        self._version: str | None = None
        """The name of the present weights, while it is to be used as soon as the device holds no other weights' KV."""
        self._kept = False
        """Whether a sleep kept the tiers, and no reset has dropped them since."""
        self._keep_once = False
        """Whether the next reset belongs to a sleep during which the weights stay."""
        self._has_warned = self._has_reported = False

    def reset_cache(self) -> bool:
        """vLLM asks for a reset. The tiers are dropped, except for a sleep with the same weights, and unless each
        version of the weights has a name."""
        keep, self._keep_once = self._keep_once, False
        if keep or (self._describe_version is not None and not self._scheduler.origin.is_private):
            self._kept = self._kept or keep
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

    def device_is_reset(self) -> None:
        """vLLM has reset its prefix cache: the device holds no KV."""
        self._scheduler.origin.is_reset()
        self._share_version()

    def sleeps(self, weights_stay: bool) -> None:
        """vLLM goes to sleep and resets its caches on the way."""
        self._keep_once = weights_stay and not self._ever_changed and not self._with_prefix_cache

    def weights_may_change(self, call: str) -> None:
        """A call that may change the weights begins. From now on nobody else finds what this vLLM saves."""
        self._may_have_changed = self._ever_changed = True
        self._keep_once = False
        self._version = None
        self._scheduler.origin.weights_change()
        if self._kept:
            # A sleep has emptied vLLM's own cache and kept the tiers, for weights that stay: nothing else drops them.
            self.reset_cache()
            self._may_have_changed = True
        if self._scheduler.origin.is_private:
            return
        self._scheduler.use_namespace(None)
        if not self._has_reported:
            self._has_reported = True
            logger.warning(
                "undercroft: %s may have changed the weights. From now on no other vLLM and no restart finds the "
                "blocks that this vLLM saves, and it finds no block from before (docs/identity.md).",
                call,
            )

    def weights_are_named(self, version: str) -> None:
        """The caller of vLLM has named the present weights (vLLM's ``weight_version``)."""
        if self._scheduler.origin.is_private:
            self._version = version
            self._share_version()

    def _share_version(self) -> None:
        """Share what is saved under the name of the weights, if all KV on the device comes from these weights."""
        version = self._version
        if version is None or self._describe_version is None or self._scheduler.origin.is_mixed:
            return
        self._version, self._may_have_changed = None, False
        self._scheduler.use_namespace(self._describe_version(version))
        logger.info("undercroft: the weights are now version %s; blocks are shared under this name.", version)
