"""vLLM's own lookup over the answers of the tier: where a hit ends, and that it has all that vLLM loads."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.v1.core.single_type_kv_cache_manager import KVCacheSpecRegistry
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import LookupResult

from test_vllm_tier import HASH, HASHES, chunks, full, key, state, window
from undercroft.vllm_tier.chunks import Chunks, why_unsupported
from undercroft.vllm_tier.options import parse
from undercroft.vllm_tier.prompts import Prompts
from undercroft.vllm_tier.tier import UndercroftTier

if TYPE_CHECKING:
    from undercroft.connector.scheduler.shareable import Shareable
    from undercroft.embed import Cache

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


ENDS = range(HASH, TOKENS + 1, HASH)


class Vllm:
    """vLLM's own lookup of a prompt, which asks ``lookup`` for each chunk."""

    def __init__(self, specs: list[Any], drafts: list[int], lookup: Callable[[bytes, Any], LookupResult]) -> None:
        ends = {key(group, end // HASH): end for group in range(len(specs)) for end in ENDS}
        self.context: Any = SimpleNamespace(get_offload_key_position=ends.get, req_id="r")
        self.groups = [group_config(index, spec, index in drafts) for index, spec in enumerate(specs)]
        self.keys = [[key(group, end // HASH) for end in ENDS] for group in range(len(specs))]
        scheduler: Any = object.__new__(offloading.OffloadingConnectorScheduler)
        scheduler.config = SimpleNamespace(kv_group_configs=self.groups, blocks_per_chunk=1)
        scheduler.manager = SimpleNamespace(lookup=lookup)
        scheduler._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)
        scheduler._chunks_being_loaded = set()
        windows = tuple(g.group_idx for g in self.groups if g.sliding_window_size_in_chunks)
        scheduler._sliding_window_groups = windows
        scheduler._lookup_groups = (
            *(g.group_idx for g in self.groups if not g.sliding_window_size_in_chunks),
            *windows,
        )
        scheduler._mamba_align_size = HASH if any(isinstance(spec, MambaSpec) for spec in specs) else None
        self.scheduler = scheduler

    def hit(self) -> int | None:
        """Where the hit ends. None: vLLM asks again in its next step."""
        status = SimpleNamespace(
            num_locally_computed_tokens=0,
            max_load_tokens=None,
            req=SimpleNamespace(num_tokens=TOKENS + 1, request_id="r"),
            req_context=self.context,
            group_states=[SimpleNamespace(offload_keys=own) for own in self.keys],
        )
        found = self.scheduler._lookup_complete_chunks(status)
        return None if found is None else int(found)

    def loads(self, hit: int) -> set[bytes]:
        """The chunks that vLLM loads for a hit."""
        found = set()
        for group, own in zip(self.groups, self.keys, strict=True):
            size = group.load_window_size_in_chunks(hit)
            loaded = own[: hit // HASH]
            found.update(loaded if size is None else loaded[-size:])
        return found


def vllms_hit(specs: list[Any], drafts: list[int], boundary: int) -> int:
    """The tokens that vLLM hits if the engine has found a hit of ``boundary`` tokens. Asserts that vLLM loads only what
    the tier has answered with."""
    served: dict[bytes, Any] = {}
    vllm = Vllm(specs, drafts, lambda one, _: LookupResult.HIT if one in served else LookupResult.MISS)
    served.update(chunks(specs, drafts=drafts).served(vllm.context, HASHES, 0, boundary))
    hit = vllm.hit()
    assert hit is not None
    assert vllm.loads(hit) <= set(served)
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


def tier_with(made: Chunks, boundary: int) -> Any:
    """A tier whose engine has all chunks of a prompt as far as ``boundary``."""

    def lookup(_: str, chain: list[bytes], begin: int, limit: int, __: Any, least: int, *___: Any) -> Any:
        end = min(len(chain) * HASH, limit, boundary)
        return SimpleNamespace(pending=False, shared_tokens=end, tokens=end if end > begin and end >= least else 0)

    session = SimpleNamespace(lookup=lookup, rest=lambda _: ("complete", None), end_lookup=lambda _: None)
    cache = SimpleNamespace(session=session, forget=lambda _: None)
    shareable = SimpleNamespace(limit=lambda _: made.groups.align(TOKENS))
    tier: Any = object.__new__(UndercroftTier)
    tier._chunks, tier._cache = made, cache
    tier._prompts = Prompts(cast("Cache", cache), made, cast("Shareable", shareable), parse({}, HASH), 1 << 20)
    tier._prompts.steps = SimpleNamespace(arrived=lambda _: None, queued=lambda _: 0)
    tier._prompts.add(SimpleNamespace(request_id="r", kv_transfer_params=None, block_hashes=HASHES))
    return tier


def vllms_lookup(tier: Any, host: set[bytes], promoted: set[bytes], one: bytes, context: Any) -> LookupResult:
    """As vLLM's host memory answers with a tier below."""
    if one in host:
        return LookupResult.HIT
    found: LookupResult = tier.lookup(one, context)
    if found is not LookupResult.HIT:
        return found
    promoted.add(one)
    return LookupResult.HIT_PENDING


@pytest.mark.parametrize(
    "specs", [[full()], [full(), window(33)], [window(16), full(), window(100)], [full(), state()]], ids=len
)
def test_a_hit_does_not_depend_on_what_vllms_host_memory_has(specs: list[Any]) -> None:
    """It has any part of the prompt: other prompts have loaded the beginning, and chunks of their own ends."""
    order = random.Random(0)
    for _ in range(200):
        boundary = order.choice(ENDS)
        tier, host, promoted = tier_with(chunks(specs), boundary), set[bytes](), set[bytes]()
        vllm = Vllm(specs, [], partial(vllms_lookup, tier, host, promoted))
        for own, group in zip(vllm.keys, vllm.groups, strict=True):
            known = own[: boundary // HASH]
            if group.sliding_window_size_in_chunks is None:
                host.update(known[: order.randint(0, len(known))])
            else:
                host.update(one for one in known if order.random() < 0.5)
        hit, steps = vllm.hit(), 0
        while hit is None:
            # The step's loads end before the next one.
            host.update(promoted)
            if promoted:
                tier._prompts.loads(tier._prompts.known["r"])
            promoted.clear()
            tier._prompts.step_ends()
            hit, steps = vllm.hit(), steps + 1
        assert hit == boundary
        assert vllm.loads(hit) <= host
        assert steps <= 3


@pytest.mark.parametrize(
    ("free", "evictable", "landed", "room"),
    [
        (36, 92, 92, 36),
        (36, 52, 92, 36),  # a prompt's chunks are being copied to the device
        (36, 0, 92, 36),
        (36, 100, 92, 44),
        (0, 40, 40, 0),
        (0, 12, 40, 0),
    ],
)
def test_chunks_that_have_landed_and_are_in_use_take_room_once(
    free: int, evictable: int, landed: int, room: int
) -> None:
    prompts = tier_with(chunks([full()]), TOKENS)._prompts
    prompts.host = SimpleNamespace(_get_num_free_chunks=lambda: free, _num_evictable_cache_chunks=evictable)
    prompts.landed = landed
    assert prompts.finds_room(room)
    assert not prompts.finds_room(room + 1)
