"""SGLang's real cache controller, with its threads, its hashes and its pools, on one rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

from host_pools import LAYERS, PAGE, fill, mha, storage_config, wrong

TOKENS = list(range(40 * PAGE))


pytestmark = pytest.mark.usefixtures("server")


def controller(rank: Any, pool: Any, disk: Path, **changed: Any) -> HiCacheController:
    """SGLang's controller with undercroft below it."""
    device = memory_pool.MHATokenToKVPool(PAGE * 8, PAGE, torch.bfloat16, 2, 32, LAYERS, "cpu", False)
    allocator = PagedTokenToKVPoolAllocator(PAGE * 8, PAGE, torch.bfloat16, "cpu", device, False)
    return HiCacheController(
        allocator,
        pool,
        PAGE,
        rank,
        threading.Event(),
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="tiny",
        storage_backend_extra_config=dict(storage_config(disk, **changed).extra_config),
    )


def until(true: Callable[[], Any]) -> Any:
    """What the controller's threads have done."""
    end = time.monotonic() + 60
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def fetched(one: HiCacheController, pool: Any, begin: int, prefix: list[str]) -> tuple[int, torch.Tensor | None]:
    """The pages that a prefetch from page ``begin`` on has brought, and their places, as SGLang's scheduler asks for
    them."""
    last = prefix[-1] if prefix else None
    operation = one.prefetch(f"request {begin}", TOKENS[begin * PAGE :], last, prefix)
    assert until(lambda: not one.prefetch_hit_queue.empty())
    assert one.prefetch_hit_queue.get() is operation
    if not operation.storage_hit_count:
        return 0, None
    operation.host_indices = pool.alloc(operation.storage_hit_count)
    one.prefetch_buffer.put(operation)
    acks = []
    while not acks or not acks[-1].completed_req:
        acks.append(one.ack_prefetch_queue.get(timeout=60))
    return max(ack.completed_tokens or 0 for ack in acks) // PAGE, operation.host_indices


def test_pages_are_written_back_and_prefetched_by_sglangs_own_threads(rank: Any, tmp_path: Path) -> None:
    pool = mha(pages=128)
    one = controller(rank, pool, tmp_path)
    hashes = one.get_hash_str(TOKENS, None, page_size=PAGE)
    places = pool.alloc(len(TOKENS))
    fill(pool, [int(index) // PAGE for index in places[::PAGE]], hashes)
    half = 20 * PAGE
    one.write_storage(places[:half], TOKENS[:half], hash_value=hashes[:20], prefix_keys=[])
    one.write_storage(places[half:], TOKENS[half:], hash_value=hashes[20:], prefix_keys=hashes[:20])
    written = [one.ack_backup_queue.get(timeout=60) for _ in range(2)]
    assert [operation.completed_tokens for operation in written] == [half, half]
    for _ in ("from memory", "from disk"):
        for begin in (0, 13):
            pages, where = fetched(one, pool, begin, hashes[:begin])
            assert pages == 40 - begin
            assert where is not None
            assert wrong(pool, [int(index) // PAGE for index in where[::PAGE]], hashes[begin:]) == []
            pool.free(where)
        one.detach_storage_backend()
        one = controller(rank, pool, tmp_path)
    one.storage_backend.clear()
    assert fetched(one, pool, 0, []) == (0, None)
    one.detach_storage_backend()


def test_prefetches_survive_failures_that_sglang_injects(
    rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.4")
    pool = mha(pages=128)
    one = controller(rank, pool, tmp_path)
    hashes = one.get_hash_str(TOKENS, None, page_size=PAGE)
    places = pool.alloc(len(TOKENS))
    fill(pool, [int(index) // PAGE for index in places[::PAGE]], hashes)
    brought = []
    for _ in range(30):
        one.write_storage(places, TOKENS, hash_value=hashes, prefix_keys=[])
        one.ack_backup_queue.get(timeout=60)
        pages, where = fetched(one, pool, 0, [])
        brought.append(pages)
        if where is not None:
            assert wrong(pool, [int(index) // PAGE for index in where[: pages * PAGE : PAGE]], hashes[:pages]) == []
            pool.free(where)
    assert 40 in brought
    assert 0 in brought
    one.detach_storage_backend()
