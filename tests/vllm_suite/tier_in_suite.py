"""undercroft's tier in the place of the example tier of vLLM's tests of tiers.

These tests store keys that belong to no prompt, and look into the example's attributes. So all keys of a tier are one
prompt here, in the order in which they come up, and the attributes show what undercroft's cache has. A copy has ended
when `submit_store` or `submit_load` returns, as with the example.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from undercroft.vllm_patches import offloading
from undercroft.vllm_tier.chunks import Chunks, KeyRun
from undercroft.vllm_tier.tier import UndercroftTier

TOKENS = 16
OPTIONS = {"host_memory": "16MiB", "model_id": "suite", "promotion_wait": "complete", "min_load_tokens": 0}
OPEN: list[Any] = []
"""The tiers of the test that runs."""


@dataclass
class Keys:
    """All keys of a tier, as the request of one context."""

    request_id: str
    keys: list[OffloadKey]
    block_hashes: list[bytes]
    kv_transfer_params: None = None
    prompt_embeds: None = None
    pooling_params: None = None
    mm_features: list[Any] = field(default_factory=list)
    resumable: bool = False
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return TOKENS * len(self.keys)


class TierInSuite(UndercroftTier):
    """The tier, with the example's constructor and attributes."""

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **_: Any,
    ) -> None:
        offloading._making.append(configuration())
        try:
            super().__init__(spec(), primary_kv_view, tier_type, backpressure_detector, **OPTIONS)
        finally:
            offloading._making.pop()
        self._keys_seen: list[OffloadKey] = []
        self._hashes: list[bytes] = []
        # The keys of these tests hold no hashes of prompts.
        self._chunks.key = lambda place, _: self._keys_seen[place.number]  # type: ignore[method-assign]
        self.bind(None)
        OPEN.append(self)

    def _know(self, keys: Iterable[OffloadKey], context: ReqContext) -> None:
        for key in keys:
            if key not in self._keys_seen:
                self._keys_seen.append(key)
                self._hashes.append(hashlib.sha256(key).digest())
        for number, key in enumerate(self._keys_seen, 1):
            context.set_offload_key_position(key, TOKENS * number)
        assert self._prompts is not None
        if self._prompts.known.get(context.req_id) is None:
            self.arrives(Keys(context.req_id, self._keys_seen, self._hashes))  # type: ignore[arg-type]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._know([key], req_context)
        assert self._prompts is not None
        self._prompts.step_ends()
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._know(job_metadata.keys, job_metadata.req_context)
        super().submit_store(job_metadata)
        self._end_copies()

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._know(job_metadata.keys, job_metadata.req_context)
        super().submit_load(job_metadata)
        self._end_copies()

    def _end_copies(self) -> None:
        assert self._cache is not None
        self._cache.drain()

    @property
    def completed_jobs(self) -> list[JobResult]:
        self._ended = list(self.get_finished_jobs())
        return self._ended

    @property
    def chunks(self) -> Stored:
        return Stored(self)

    def get_num_chunks(self) -> int:
        assert self._cache is not None
        return int(self._cache.stats()["host_blocks"])

    def close(self) -> None:
        self.shutdown()


class Stored:
    """The example's dict of chunks."""

    def __init__(self, tier: TierInSuite) -> None:
        self._tier = tier

    def __setitem__(self, key: OffloadKey, value: bool) -> None:
        tier, context = self._tier, ReqContext(req_id="stored")
        tier._know([key], context)
        place = tier._chunks.place(key, context.get_offload_key_position(key), tier._hashes)
        assert place is not None
        assert tier._cache is not None
        blocks = Chunks.blocks([KeyRun(place.engine_group, place.number, 0, 1)], np.array([tier._region[0]], np.int64))
        assert tier._cache.save(tier._hashes, blocks).complete


@functools.cache
def configuration() -> tuple[Any, KVCacheConfig]:
    """A vLLM of vLLM's tests, with one group of full attention."""
    from tests.v1.kv_connector.unit import utils

    group = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float16)
    page = group.page_size_bytes
    tensor = KVCacheTensor(page, ["layer"], layer_stride=page, block_stride=page)
    return utils.create_vllm_config(), KVCacheConfig(1, [tensor], [KVCacheGroupSpec(["layer"], group)])


def spec() -> Any:
    """vLLM's specification of the offloading, as far as the tier reads it."""
    cache = SimpleNamespace(tokens_per_hash=TOKENS, blocks_per_chunk=1)
    groups = [SimpleNamespace(group_id=0, tokens_per_block=TOKENS)]
    layout = {"kv_cache_layout": None, "canonical_layout": False, "replicated_layout": False, "parallel": None}
    return SimpleNamespace(config=SimpleNamespace(cache=cache, groups=groups, enable_kv_cache_events=False, **layout))
