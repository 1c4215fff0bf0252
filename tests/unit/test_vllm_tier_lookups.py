"""vLLM's own lookup over the answers of the tier: where a hit ends, and that it has all that vLLM loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.v1.core.single_type_kv_cache_manager import KVCacheSpecRegistry
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import LookupResult

from test_vllm_tier import HASH, HASHES, chunks, full, key, state, window
from undercroft.vllm_tier.chunks import why_unsupported

WINDOWS: Any = config if hasattr(config, "get_sliding_window_size_in_chunks") else offloading
"""The module that has the function: `config` since vLLM 0.33."""
TOKENS = 12 * HASH
"""Of the prompt, and another token."""


def group_config(index: int, spec: Any, is_draft: bool) -> Any:
    return offloading.GroupOffloadConfig(
        group_idx=index,
        tokens_per_block=HASH,
        tokens_per_chunk=HASH,
        hashes_per_chunk=1,
        sliding_window_size_in_chunks=WINDOWS.get_sliding_window_size_in_chunks(spec, HASH),
        kv_cache_spec=spec,
        manager_cls=KVCacheSpecRegistry.get_manager_class(spec),
        kv_event_group_spec=None,
        is_eagle_group=is_draft,
    )


def vllms_hit(specs: list[Any], drafts: list[int], boundary: int) -> int:
    """The tokens that vLLM hits if the engine has found a hit of ``boundary`` tokens. Asserts that vLLM loads only what
    the tier has answered with."""
    ends = {key(group, end // HASH): end for group in range(len(specs)) for end in range(HASH, TOKENS + 1, HASH)}
    context: Any = SimpleNamespace(get_offload_key_position=ends.get)
    served = chunks(specs, drafts=drafts).served(context, HASHES, 0, boundary)
    groups = [group_config(index, spec, index in drafts) for index, spec in enumerate(specs)]
    scheduler: Any = object.__new__(offloading.OffloadingConnectorScheduler)
    scheduler.config = SimpleNamespace(kv_group_configs=groups, blocks_per_chunk=1)
    scheduler.manager = SimpleNamespace(lookup=lambda one, _: LookupResult.HIT if one in served else LookupResult.MISS)
    scheduler._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)
    scheduler._chunks_being_loaded = set()
    scheduler._sliding_window_groups = tuple(g.group_idx for g in groups if g.sliding_window_size_in_chunks)
    scheduler._lookup_groups = (
        *(g.group_idx for g in groups if not g.sliding_window_size_in_chunks),
        *scheduler._sliding_window_groups,
    )
    scheduler._mamba_align_size = HASH if any(isinstance(spec, MambaSpec) for spec in specs) else None
    keys = [[one for one in ends if one[-4:] == key(group)[-4:]] for group in range(len(specs))]
    status = SimpleNamespace(
        num_locally_computed_tokens=0,
        max_load_tokens=None,
        req=SimpleNamespace(num_tokens=TOKENS + 1, request_id="r"),
        req_context=context,
        group_states=[SimpleNamespace(offload_keys=own) for own in keys],
    )
    hit = int(scheduler._lookup_complete_chunks(status))
    for group, own in zip(groups, keys, strict=True):
        loaded = own[: hit // HASH]
        size = group.load_window_size_in_chunks(hit)
        assert set(loaded if size is None else loaded[-size:]) <= set(served), group
    return hit


@pytest.mark.parametrize("boundary", [5 * HASH, 11 * HASH, 12 * HASH])
def test_vllm_hits_as_much_as_the_engine_or_a_chunk_less_beside_a_draft(boundary: int) -> None:
    for specs in ([full()], [full(), window(33)], [window(16), full(), window(100)], [full(), state()]):
        assert vllms_hit(specs, [], boundary) == boundary, specs
    for specs, drafts in (
        ([full()], [0]),
        ([full(), full()], [1]),
        ([full(), window(33)], [0]),
        ([full(), window(33)], [1]),
        ([full(), window(33), window(100)], [0, 2]),
    ):
        assert vllms_hit(specs, drafts, boundary) == boundary - HASH, (specs, drafts)


def test_no_hit_beside_a_draft_ends_at_a_state_so_the_tier_is_off() -> None:
    """vLLM leaves out the last chunk of the draft's group, and the tier has no state a chunk earlier."""
    for boundary in (5 * HASH, 11 * HASH, 12 * HASH):
        assert vllms_hit([full(), state()], [0], boundary) == 0
    for drafts, is_off in (([], False), ([0], True)):
        groups = [
            KVCacheGroupSpec([f"layer{index}"], spec, is_eagle_group=index in drafts)
            for index, spec in enumerate([full(), state()])
        ]
        found = why_unsupported(KVCacheConfig(1, [], groups), [0, 1])
        assert (found is not None and "draft" in found) == is_off
