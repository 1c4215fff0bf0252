"""The patches that the connector needs: failed loads, LoRA adapters, local hits, resets, shared prefixes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from undercroft.log import logger
from undercroft.vllm_patches.checks import needs, sets, takes
from undercroft.vllm_patches.table import (
    ADAPTER_WEIGHTS,
    LOAD_FAILURE_POLICY,
    LOADED_REQUESTS,
    LOCAL_HITS,
    PREEMPTIONS,
    PREFIX_CACHE_RESET,
    RESERVATIONS,
    SHARED_PREFIX,
    failed,
    guarded,
    problem,
    replace,
)

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from undercroft.connector.scheduler.request_state import RequestState

_ADAPTER = "_undercroft_adapter"
"""Attribute of a request: the key of its adapter's weights. All blocks of the request use this one key."""
_RESERVED = "_undercroft_reserved"
"""Attribute of a request: vLLM's set of all requests for which it reserves blocks."""
_GIVEN_UP = "_undercroft_given_up"
"""Attribute of a request: vLLM is to treat its load under way as a failed one."""
_WAITING = ("WAITING_FOR_REMOTE_KVS", "WAITING", "PREEMPTED")
"""States of a request that may hold the blocks of a load and has not run since."""


@guarded(LOAD_FAILURE_POLICY)
def recompute_failed_loads(kv_transfer_config: KVTransferConfig) -> None:
    """Set the policy for failed loads. vLLM reads the policy after the connector's constructor."""
    if kv_transfer_config.kv_load_failure_policy != "recompute":
        kv_transfer_config.kv_load_failure_policy = "recompute"
        logger.info('undercroft: set kv_load_failure_policy to "recompute": a failed load counts as a miss.')


@guarded(ADAPTER_WEIGHTS)
def tell_adapters_apart(of_request: Callable[[Request], str], before_loading: Callable[[Any], Any]) -> None:
    """Add ``of_request``, a key of the adapter's weights, to the block hashes of requests with a LoRA adapter.

    ``before_loading``: called with each adapter (`LoRARequest`) that vLLM loads before a request needs the adapter.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    takes(kv_cache_utils, "_gen_lora_extra_hash_keys", "request")
    takes(EngineCore, "add_lora", "lora_request")

    def key(request: Any) -> str:
        try:
            found: str | None = getattr(request, _ADAPTER, None)
            if found is None:
                found = of_request(request)
                setattr(request, _ADAPTER, found)
        except Exception as error:
            # The weights are unknown, so no other request may find these blocks.
            failed(ADAPTER_WEIGHTS, error)
            return secrets.token_hex(16)
        return found

    def wrap_keys(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
        def keys(request: Any) -> list[Any]:
            found = original(request)
            return [*found, ("lora_weights", key(request))] if found else found

        return keys

    def wrap_add(original: Callable[..., bool]) -> Callable[..., bool]:
        def add_lora(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> bool:
            try:
                before_loading(lora_request)
            except Exception as error:  # An adapter must not end the engine.
                failed(ADAPTER_WEIGHTS, error)
            return original(self, lora_request, *args, **kwargs)

        return add_lora

    replace((kv_cache_utils, "_gen_lora_extra_hash_keys", wrap_keys), (EngineCore, "add_lora", wrap_add))


@guarded(LOCAL_HITS)
def reconcile_local_hits(kv_cache_manager: KVCacheManager, usable: Callable[[Request, int], bool]) -> None:
    """Call ``usable(request, tokens)`` before vLLM offers a local hit of full attention that undercroft must complete.

    vLLM then asks only for an external hit above this local hit. If there is none, vLLM does not ask again for an
    external hit above the boundary that all groups hold. ``usable`` raises nothing.
    """
    needs(hasattr(kv_cache_manager, "get_computed_blocks"), "KVCacheManager has no get_computed_blocks")

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_computed_blocks_for_connector(request: Any, *limits: Any, **named_limits: Any) -> Any:
            # vLLM 0.33 also passes the longest allowed hit.
            hit = original(request, *limits, **named_limits)
            try:
                *_, tokens, _, diverged = hit
                refused = diverged and not usable(request, tokens)
            except Exception as error:
                failed(LOCAL_HITS, error)
                return hit
            if refused:
                return (*kv_cache_manager.get_computed_blocks(request, *limits, **named_limits), False)
            return hit

        return get_computed_blocks_for_connector

    replace((kv_cache_manager, "get_computed_blocks_for_connector", wrap), again=True)


@guarded(PREFIX_CACHE_RESET)
def before_prefix_cache_reset(block_pool: BlockPool, action: Callable[[], None]) -> None:
    """Run ``action`` each time before the pool resets its prefix cache."""

    def wrap(original: Callable[..., bool]) -> Callable[..., bool]:
        def reset_prefix_cache(*args: Any, **kwargs: Any) -> bool:
            try:
                action()
            except Exception as error:  # vLLM then refuses the reset, as without the patch.
                failed(PREFIX_CACHE_RESET, error)
            return original(*args, **kwargs)

        return reset_prefix_cache

    replace((block_pool, "reset_prefix_cache", wrap), again=True)


@guarded(PREFIX_CACHE_RESET)
def lend_to_prefix_cache_reset(
    block_pool: BlockPool, held: Callable[[], list[list[KVCacheBlock]]], on_reset: Callable[[], None]
) -> None:
    """Free the blocks that are ``held``, each list once, while the pool resets its prefix cache, and take them back at
    once. Then ``on_reset`` runs, unless the pool has refused the reset."""

    def wrap_lending(original: Callable[..., bool]) -> Callable[..., bool]:
        def reset_prefix_cache(*args: Any, **kwargs: Any) -> bool:
            lent: list[list[KVCacheBlock]] = []
            try:
                for blocks in held():
                    block_pool.free_blocks(blocks)
                    lent.append(blocks)
            except Exception as error:  # vLLM then refuses the reset, as without the patch.
                failed(PREFIX_CACHE_RESET, error)
            try:
                is_reset = original(*args, **kwargs)
            finally:
                # Nothing else has taken a block meanwhile.
                for blocks in lent:
                    block_pool.touch(blocks)
            if is_reset:
                on_reset()
            return is_reset

        return reset_prefix_cache

    replace((block_pool, "reset_prefix_cache", wrap_lending), again=True)


@guarded(PREFIX_CACHE_RESET)
def after_prefix_cache_reset(block_pool: BlockPool, action: Callable[[], None]) -> None:
    """Run ``action`` each time after the pool has reset its prefix cache."""

    def wrap_after(original: Callable[..., bool]) -> Callable[..., bool]:
        def reset_prefix_cache(*args: Any, **kwargs: Any) -> bool:
            is_reset = original(*args, **kwargs)
            try:
                if is_reset:
                    action()
            except Exception as error:  # The cache is reset even if the action fails.
                failed(PREFIX_CACHE_RESET, error)
            return is_reset

        return reset_prefix_cache

    replace((block_pool, "reset_prefix_cache", wrap_after), again=True)


@guarded(RESERVATIONS)
def end_reservations() -> None:
    """End vLLM's reservation of device blocks for each request that has lost its own, as vLLM does at a preemption.
    The requests of `recompute_load` lose theirs here."""
    from vllm.v1.core.sched.scheduler import Scheduler

    takes(Scheduler, "_update_waiting_for_remote_kv", "request")
    sets(Scheduler, "_inflight_prefills", "failed_recving_kv_req_ids")

    def wrap(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def update_waiting_for_remote_kv(self: Any, request: Any) -> None:
            if getattr(request, _GIVEN_UP, False):
                # As vLLM does itself for a failed load: it frees the blocks and looks the request up again.
                setattr(request, _GIVEN_UP, False)
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request.request_id)
            original(self, request)
            try:
                setattr(request, _RESERVED, self._inflight_prefills)
                if request.num_computed_tokens == 0:
                    _end_reservation(request)
            except Exception as error:  # vLLM goes on with the reservation.
                failed(RESERVATIONS, error)

        return update_waiting_for_remote_kv

    replace((Scheduler, "_update_waiting_for_remote_kv", wrap))


@guarded(PREEMPTIONS)
def evict_uncomputed() -> None:
    """Evict the blocks of preempted requests that no step has computed or will compute from vLLM's prefix cache."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    takes(Scheduler, "_preempt_request", "request")
    takes(KVCacheManager, "evict_blocks", "block_ids")
    takes(KVCacheManager, "get_block_ids", "request_id")
    sets(Scheduler, "kv_cache_manager")

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
            try:
                manager = self.kv_cache_manager
                tables = manager.get_block_ids(request.request_id)
                groups = manager.kv_cache_config.kv_cache_groups
                # vLLM counts the tokens of the present step as computed only at the step's end.
                beyond: set[int] = set()
                for group, table in zip(groups, tables, strict=True):
                    beyond.update(table[request.num_computed_tokens // group.kv_cache_spec.block_size :])
                manager.evict_blocks(beyond - {manager.block_pool.null_block.block_id})
            except Exception as error:  # vLLM preempts the request in any case.
                failed(PREEMPTIONS, error)
            original(self, request, *args, **kwargs)

        return preempt_request

    replace((Scheduler, "_preempt_request", wrap))


def recompute_load(request: Request) -> bool:
    """Let vLLM free the blocks of the request's load under way when it ends, and look the request up again. Returns
    whether vLLM will."""
    if problem(RESERVATIONS) is not None:
        return False
    setattr(request, _GIVEN_UP, True)
    return True


def _end_reservation(request: Any) -> None:
    getattr(request, _RESERVED, set()).discard(request)


@guarded(LOADED_REQUESTS)
def free_loaded(kv_cache_manager: KVCacheManager, loaded: Iterable[RequestState], *, alone: bool) -> None:
    """Free the device blocks of requests that wait after a load, successful or not, and have not run.

    vLLM then looks these requests up again, as after a failed load. ``alone``: do nothing if others hold blocks too.
    """
    waiting = [state for state in loaded if state.request.status.name in _WAITING]
    if not waiting:
        return
    tables = [kv_cache_manager.get_block_ids(state.request.request_id) for state in waiting]
    pool = kv_cache_manager.block_pool
    held = {block for groups in tables for table in groups for block in table} - {pool.null_block.block_id}
    if alone and pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() != len(held):
        # vLLM refuses the reset in any case.
        return
    for state in waiting:
        state.is_loaded, state.lost_blocks = False, True
        state.request.num_computed_tokens = 0
        _end_reservation(state.request)
        kv_cache_manager.free(state.request)


@guarded(SHARED_PREFIX)
def end_step_at(request: Request, boundary: int) -> None:
    """Let vLLM end a step of the request after ``boundary`` tokens, unless vLLM has set a boundary itself."""
    if request.shared_prefix_boundary == 0:
        request.shared_prefix_boundary = boundary
