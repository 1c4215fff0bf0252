"""Requests that were loaded and wait: vLLM keeps their device blocks, even where it cannot go on without the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undercroft import vllm_patches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from undercroft.connector.scheduler.request_state import RequestState

IDLE_STEPS = 16
"""Successive steps without a token after which nothing but these blocks can be what vLLM waits for. More than the steps
that vLLM schedules before the oldest one ends."""


class WaitingLoads:
    """Frees the device blocks of loaded requests that have not run. vLLM looks these requests up again later."""

    def __init__(self, requests: Mapping[str, RequestState]) -> None:
        """``requests``: all requests that the scheduler's half knows."""
        self._requests = requests
        self._manager: KVCacheManager | None = None
        self.idle_steps = 0
        """Successive steps up to now without a token and without a transfer."""
        self.may_requeue = vllm_patches.end_reservations()
        """Whether a request without device blocks may wait behind others: vLLM then reserves no blocks for it."""

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's prefix cache."""
        self._manager = manager

    def blocks_of(self, request_ids: Iterable[str]) -> list[list[KVCacheBlock]]:
        """The device blocks that each KV cache group of these requests holds."""
        if self._manager is None:
            return []
        manager = self._manager
        groups = (blocks for request_id in request_ids for blocks in manager.get_blocks(request_id).blocks)
        return [[block for block in blocks if not block.is_null] for blocks in groups]

    def make_way_for_reset(self) -> None:
        """vLLM is about to reset its prefix cache, and refuses while blocks are in use."""
        self._free(alone=True)

    def after_idle_step(self, *, transfers: bool) -> None:
        """vLLM has scheduled a step without a token. ``transfers``: a load or save is under way.

        If no step runs a token, a session with streaming input may wait for the blocks of loaded requests behind it.
        """
        self.idle_steps = 0 if transfers else self.idle_steps + 1
        if self.idle_steps == IDLE_STEPS:
            self._free(alone=False)

    def _free(self, *, alone: bool) -> None:
        if self.may_requeue and self._manager is not None:
            waiting = [state for state in self._requests.values() if state.is_loaded and not state.ran]
            vllm_patches.free_loaded(self._manager, waiting, alone=alone)
