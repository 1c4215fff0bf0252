"""A driver of SGLang's radix tree and cache controller: prompts pass through them as SGLang's scheduler lets them pass.

SGLang's kernels of the copies between device and host need a GPU. `copy_without_kernels` puts copies by torch in their
place; everything else is SGLang's own.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.pool_host import common, mha
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context

from host_pools import LAYERS, PAGE, content, page_hashes, storage_config

DEVICE_PAGES = 48
HEADS, DIM = 2, 32


def copy_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang's host pools copy by torch."""
    monkeypatch.setattr(common, "_cuda_host_register", lambda *_: None)
    monkeypatch.setattr(mha, "transfer_kv_all_layer_direct_lf_pf", _backup_pages, raising=False)
    monkeypatch.setattr(mha, "transfer_kv_per_layer_direct_pf_lf", _load_pages, raising=False)
    monkeypatch.setattr(mha, "transfer_kv_direct", _copy_layers, raising=False)


def _backup_pages(*, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for host, layers in zip(dst_ptrs, (src_ptrs[:LAYERS], src_ptrs[LAYERS:]), strict=True):
        for number, layer in enumerate(layers):
            host[dst_indices // page_size, number, dst_indices % page_size] = layer[src_indices]


def _load_pages(
    *, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[src_indices // page_size, layer_id, src_indices % page_size]


def _copy_layers(*, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    assert page_size == PAGE
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


class Served(SimpleNamespace):
    """Tokens of a prompt that were on the device, in SGLang's host memory, in storage, and that were computed."""

    device: int
    host: int
    storage: int
    computed: int


class Driver:
    """SGLang's caches on one rank, with undercroft below them."""

    def __init__(self, rank: Any, arguments: Any) -> None:
        self.pool = memory_pool.MHATokenToKVPool(
            PAGE * DEVICE_PAGES, PAGE, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False
        )
        self.allocator = PagedTokenToKVPoolAllocator(PAGE * DEVICE_PAGES, PAGE, torch.bfloat16, "cpu", self.pool, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=rank,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(arguments, params)
        atexit.unregister(self.tree.shutdown)
        self._names = itertools.count()

    def serve(self, tokens: Sequence[int]) -> Served:
        """Serve a prompt of whole pages, and compare the KV that was found with the KV that belongs to it."""
        tokens = array("q", tokens)
        handle = CacheRequestHandle(f"request {next(self._names)}", 0)
        hit = self._match(tokens)
        before = hit.device_prefix_len + hit.host_hit_length
        node = hit.last_host_node
        self.tree.prefetch_from_storage(
            handle,
            node,
            tokens[before:],
            self.tree.get_last_hash_value(node),
            self.tree.get_prefix_hash_values(node),
            matched_prefix_tokens=tokens[:before],
        )
        self._until(lambda: self.tree.check_prefetch_progress(handle))
        storage = self.tree.pop_prefetch_loaded_tokens(handle)
        hit = self._match(tokens)
        device, node = hit.device_prefix_len, hit.last_device_node
        # The prefix stays, while memory is made for the rest.
        lock = self.tree.lock(node)
        loaded = self._load_back(hit, handle)
        if loaded:
            self.tree.unlock(lock)
            node = self._match(tokens).last_device_node
            lock = self.tree.lock(node)
        prefix = self.tree.path_device_indices(node)
        assert len(prefix) == device + loaded
        wrong = self.wrong(tokens, prefix)
        assert not wrong, f"pages {wrong} of a hit of {device} + {loaded} tokens, {storage} of storage"
        values = torch.cat([prefix, self._compute(tokens, len(prefix))])
        self.tree.insert(InsertParams(key=RadixKey(tokens), value=values, prev_prefix_len=len(prefix)))
        self.tree.unlock(lock)
        self.tree.check_hicache_events()
        return Served(device=device, host=loaded - storage, storage=storage, computed=len(tokens) - len(prefix))

    def _match(self, tokens: array) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def _load_back(self, hit: Any, handle: CacheRequestHandle) -> int:
        """Load what lies in SGLang's host memory. Returns its tokens."""
        request = SimpleNamespace(
            rid=handle.rid,
            cache_request_handle=handle,
            last_node=hit.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            kv=SimpleNamespace(mamba_pool_idx=None),
        )
        loaded, _ = self.tree.init_load_back(
            InitLoadBackParams(best_match_node=hit.best_match_node, host_hit_length=hit.host_hit_length, req=request)
        )
        self.tree.ready_to_load_host_cache()
        self._until(lambda: not self.tree.ongoing_load_back)
        return loaded

    def _compute(self, tokens: array, begin: int) -> torch.Tensor:
        """Write the KV of the tokens from ``begin`` on, and return its places."""
        count = len(tokens) - begin
        if not count:
            return torch.empty(0, dtype=torch.int64)
        if self.allocator.available_size() < count:
            self.tree.evict(EvictParams(num_tokens=count - self.allocator.available_size()))
            self._until(lambda: self.allocator.available_size() >= count)
        places = self.allocator.alloc(count)
        for number, page in enumerate(page_hashes(tokens, None, PAGE)[begin // PAGE :]):
            where = places[number * PAGE : (number + 1) * PAGE]
            for buffer, values in zip(self._buffers(), self._kv(page), strict=True):
                buffer[where] = values
        return places

    def wrong(self, tokens: array, places: torch.Tensor) -> list[int]:
        """The pages on the device that do not hold the KV of their tokens."""
        found = []
        for number, page in enumerate(page_hashes(tokens[: len(places)], None, PAGE)):
            where = places[number * PAGE : (number + 1) * PAGE]
            pairs = zip(self._buffers(), self._kv(page), strict=True)
            if not all(torch.equal(buffer[where].view(torch.int16), kv.view(torch.int16)) for buffer, kv in pairs):
                found.append(number)
        return found

    def _buffers(self) -> list[torch.Tensor]:
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def _kv(self, page: str) -> torch.Tensor:
        """The KV that belongs to a page, by buffer."""
        like = torch.empty(2 * LAYERS, PAGE, HEADS, DIM, dtype=torch.bfloat16)
        return content(page, like).reshape(like.shape)

    def settle(self) -> None:
        """Wait until SGLang has written everything back."""
        self._until(lambda: not (self.tree.ongoing_write_through or self.tree.ongoing_backup))

    def forget(self) -> None:
        """Drop everything on the device and in SGLang's host memory."""
        self.settle()
        self.tree.reset()
        self.allocator.clear()

    def close(self) -> None:
        """End as SGLang does when it stops."""
        self.tree.shutdown()
        self.tree.release_host_resources()

    def _until(self, true: Any) -> None:
        end = time.monotonic() + 60
        while True:
            self.tree.check_hicache_events()
            if true():
                return
            assert time.monotonic() < end
            time.sleep(0.001)


@contextlib.contextmanager
def driver(rank: Any, disk: Path, *, layout: str, policy: str, **changed: Any) -> Iterator[Driver]:
    """A driver that is closed at the end. ``changed``: options of undercroft."""
    extra = {
        **storage_config(disk, **changed).extra_config,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": PAGE,
    }
    with get_context().override_server_args(
        enable_hierarchical_cache=True,
        hicache_mem_layout=layout,
        hicache_io_backend="direct",
        hicache_ratio=2.0,
        hicache_size=0,
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        hicache_write_policy=policy,
        hicache_storage_prefetch_policy="wait_complete",
        page_size=PAGE,
    ) as arguments:
        one = Driver(rank, arguments)
        try:
            yield one
        finally:
            one.close()
