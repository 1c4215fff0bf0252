"""SGLang's real cache controller, with its threads, its hashes and its pools, on one rank."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import memory_pool, utils
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs

from host_pools import LAYERS, PAGE, fill, mha, storage_config, wrong
from undercroft.sglang_hicache import backend

TOKENS = list(range(40 * PAGE))


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of one rank."""
    place = tmp_path_factory.mktemp("gloo") / "group"
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    with (
        get_context().override_server_args(),
        get_parallel().override(
            tp_rank=0, pp_rank=0, attn_cp_rank=0, attn_dcp_rank=0, attn_dcp_size=1, attn_tp_rank=0, attn_tp_size=1
        ),
    ):
        yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was started with the back end."""
    arguments = ServerArgs(model_path="tiny", hicache_storage_backend="dynamic")
    monkeypatch.setattr(backend, "_arguments", lambda: arguments)


@pytest.fixture(autouse=True)
def hash_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang compiles its hash of pages at its first use, which takes a compiler."""
    monkeypatch.setattr(utils, "get_native_hash", page_hashes)


def page_hashes(tokens: Sequence[int], prior: bytes | None, page_size: int) -> list[str]:
    """The hash of each whole page, and of everything before it."""
    found, last = [], prior or b""
    for begin in range(0, len(tokens) - page_size + 1, page_size):
        last = hashlib.sha256(last + np.asarray(tokens[begin : begin + page_size], "<u4").tobytes()).digest()
        found.append(last.hex())
    return found


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
