"""Models with several pools: SGLang's storage interface v2, with its real pools."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from host_pools import after, fill, indices, keys, mamba, mha, mla, opened, wipe, wrong
from serve_process import ServeProcess
from undercroft.sglang_hicache import UndercroftHiCache

CHAIN = keys("a", 12)
TRAILING = PoolHitPolicy.TRAILING_PAGES


class Hybrid:
    """A back end with pools of keys and values, states, a window and an index."""

    def __init__(self, disk: Path, layout: str = "page_first", **options: Any) -> None:
        self.pools: dict[Any, Any] = {
            PoolName.KV: mha(layout),
            PoolName.MAMBA: mamba("page_first" if layout == "layer_first" else layout),
            PoolName.SWA: mha(layout, heads=1),
            PoolName.INDEXER: mha(layout, heads=1),
        }
        self.store: UndercroftHiCache = opened(disk, self.pools[PoolName.KV], **options)
        for name, pool in self.pools.items():
            self.store.register_mem_host_pool_v2(pool, name)
        self.store.on_host_pools_registered()

    def keep(self, name: Any, of: list[str], before: list[str]) -> list[bool]:
        """Keep pages of a pool."""
        where = fill(self.pools[name], range(len(of)), of)
        if name == PoolName.KV:
            return self.store.batch_set_v1(of, where, after(before))
        done = self.store.batch_set_v2([PoolTransfer(name, host_indices=where, keys=of)], after(before))
        return done[name]

    def got(self, name: Any, of: list[str], before: list[str]) -> list[bool]:
        """Load pages of a pool, and check those that came."""
        pool, places = self.pools[name], range(20, 20 + len(of))
        where = wipe(pool, places)
        done = self.store.batch_get_v2([PoolTransfer(name, host_indices=where, keys=of)], after(before))[name]
        assert wrong(pool, places, of, done) == []
        return done

    def exists(self, *transfers: PoolTransfer, of: list[str] = CHAIN, before: tuple[str, ...] = ()) -> Any:
        """SGLang's question."""
        return self.store.batch_exists_v2(of, list(transfers), after(before))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_states_are_kept_before_their_pages_and_come_back_after_a_restart(layout: str, tmp_path: Path) -> None:
    one = Hybrid(tmp_path, layout)
    # SGLang saves the other pools first.
    assert one.keep(PoolName.MAMBA, CHAIN[7:8], CHAIN[:7]) == [True]
    assert one.keep(PoolName.MAMBA, CHAIN[11:], CHAIN[:11]) == [True]
    assert one.keep(PoolName.KV, CHAIN, []) == [True] * 12
    for _ in ("from memory", "from disk"):
        found = one.exists(PoolTransfer(PoolName.MAMBA, keys=CHAIN[-1:], hit_policy=TRAILING))
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (12, [8, 12])
        assert found.extra_pool_hit_pages == {PoolName.KV: 12, PoolName.MAMBA: 12}
        found = one.exists(PoolTransfer(PoolName.MAMBA, keys=CHAIN[10:11], hit_policy=TRAILING), of=CHAIN[:11])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (8, [8])
        assert one.got(PoolName.MAMBA, CHAIN[7:8], CHAIN[:7]) == [True]
        assert one.got(PoolName.MAMBA, CHAIN[8:9], CHAIN[:8]) == [False]
        one.store.close()
        one = Hybrid(tmp_path, layout)
    one.store.close()


def test_a_window_needs_its_last_pages_only(tmp_path: Path) -> None:
    one = Hybrid(tmp_path)
    one.keep(PoolName.KV, CHAIN, [])
    assert one.keep(PoolName.SWA, CHAIN[3:6], CHAIN[:3]) == [True] * 3
    assert one.keep(PoolName.SWA, CHAIN[10:], CHAIN[:10]) == [True] * 2
    window = PoolTransfer(PoolName.SWA, keys=CHAIN[-2:], hit_policy=TRAILING)
    assert one.exists(window).restorable_prefix_pages == [5, 6, 12]
    # The pages of the window before the question are on the device.
    assert one.exists(window, of=CHAIN[3:], before=tuple(CHAIN[:3])).restorable_prefix_pages == [1, 2, 3, 9]
    assert one.got(PoolName.SWA, CHAIN[4:6], CHAIN[:4]) == [True] * 2
    assert one.got(PoolName.SWA, CHAIN[9:], CHAIN[:9]) == [False, True, True]
    one.store.close()


@pytest.mark.parametrize("count", [600, 1_200])
def test_a_question_about_a_window_reads_each_hash_once(count: int, tmp_path: Path) -> None:
    one, chain = Hybrid(tmp_path), keys("long", count)
    kept = one.store._stores[PoolName.SWA]
    for first in range(0, count, 64):
        assert all(one.keep(PoolName.SWA, chain[first : first + 64], chain[:first]))
    asked: list[int] = []
    session = kept.cache.session

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

        def lookup(self, name: str, hashes: list[bytes], *rest: Any) -> Any:
            asked.append(len(hashes))
            return session.lookup(name, hashes, *rest)

    kept.cache.session = Counting()
    assert kept.held(chain, time.monotonic() + 60) == set(range(count))
    assert sum(asked) == count
    kept.cache.session = session
    one.store.close()


def test_an_index_needs_all_pages(tmp_path: Path) -> None:
    one = Hybrid(tmp_path)
    one.keep(PoolName.KV, CHAIN, [])
    assert one.keep(PoolName.INDEXER, CHAIN[:7], []) == [True] * 7
    found = one.exists(PoolTransfer(PoolName.INDEXER))
    assert found.kv_hit_pages == 7
    assert found.restorable_prefix_pages == list(range(1, 8))
    assert one.got(PoolName.INDEXER, CHAIN[:9], []) == [True] * 7 + [False] * 2
    one.store.close()


def test_pools_limit_a_hit_together(tmp_path: Path) -> None:
    one = Hybrid(tmp_path)
    one.keep(PoolName.KV, CHAIN[:10], [])
    one.keep(PoolName.INDEXER, CHAIN[:8], [])
    one.keep(PoolName.MAMBA, CHAIN[5:6], CHAIN[:5])
    one.keep(PoolName.MAMBA, CHAIN[8:9], CHAIN[:8])
    transfers = [PoolTransfer(PoolName.INDEXER), PoolTransfer(PoolName.MAMBA, hit_policy=TRAILING)]
    found = one.exists(*transfers)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 10, PoolName.INDEXER: 8, PoolName.MAMBA: 9}
    one.store.close()


def test_all_pools_lie_on_a_server(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "s") as server:
        one = Hybrid(tmp_path, server=f"unix://{server.socket}")
        end = time.monotonic() + 60
        for name in one.pools:
            while not all(one.keep(name, CHAIN, [])):
                assert time.monotonic() < end, name
        for name in one.pools:
            assert one.got(name, CHAIN, []) == [True] * 12, name
        one.store.close()


def test_another_host_finds_no_window_in_the_remote_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    pool, window, chain = mha(heads=32), mha(heads=32), keys("a", 64)
    remote = {"remote": f"file://{tmp_path / 'store'}", "remote_object": "1MiB"}
    one, other = (opened(tmp_path / name, pool, **remote) for name in ("one", "two"))
    transfer = PoolTransfer(PoolName.SWA, fill(window, range(64), chain), keys=chain, hit_policy=TRAILING)
    for store in (one, other):
        store.register_mem_host_pool_v2(window, PoolName.SWA)
    assert one.batch_set_v2([transfer], after()) == {PoolName.SWA: [True] * 64}
    assert one.batch_set_v1(chain, fill(pool, range(64), chain), after()) == [True] * 64
    end = time.monotonic() + 60
    while other.batch_exists(chain, after()) < len(chain):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert one.batch_exists_v2(chain, [transfer], after()).kv_hit_pages == 64
    assert other.batch_exists_v2(chain, [transfer], after()).kv_hit_pages == 0, "so SGLang computes the prompt"
    other.close()
    one.close()


def test_a_pool_that_was_never_registered_has_nothing(tmp_path: Path) -> None:
    one = Hybrid(tmp_path)
    one.keep(PoolName.KV, CHAIN, [])
    assert one.exists(PoolTransfer(PoolName.DRAFT)).kv_hit_pages == 0
    where = indices(one.pools[PoolName.SWA], range(2))
    transfer = PoolTransfer(PoolName.DRAFT, host_indices=where, keys=CHAIN[:2])
    assert one.store.batch_get_v2([transfer], after()) == {PoolName.DRAFT: [False] * 2}
    assert one.store.batch_set_v2([transfer], after()) == {PoolName.DRAFT: [False] * 2}
    one.store.close()


def test_a_window_that_a_pool_needs_whole_ends_at_its_first_hole(tmp_path: Path) -> None:
    one = Hybrid(tmp_path)
    one.keep(PoolName.KV, CHAIN, [])
    one.keep(PoolName.SWA, CHAIN[:3], [])
    one.keep(PoolName.SWA, CHAIN[8:], CHAIN[:8])
    assert one.exists(PoolTransfer(PoolName.SWA)).restorable_prefix_pages == [1, 2, 3]
    one.store.close()


def test_ranks_of_latent_attention_share_all_pools_but_states_and_heads(tmp_path: Path) -> None:
    pools = {PoolName.DRAFT: mla(), PoolName.SWA: mla(), PoolName.MAMBA: mamba(), PoolName.DRAFT_SWA: mha()}
    stores = []
    for rank in range(2):
        store = opened(tmp_path, mla(), is_mla_model=True, tp_rank=rank, tp_size=2)
        for name, pool in pools.items():
            store.register_mem_host_pool_v2(pool, name)
        stores.append(store)
    for name, pool in pools.items():
        where = fill(pool, range(2), CHAIN[:2])
        transfer = PoolTransfer(name, host_indices=where, keys=CHAIN[:2])
        assert stores[0].batch_set_v2([transfer], after()) == {name: [True] * 2}
        shared = name in (PoolName.DRAFT, PoolName.SWA)
        assert stores[1].batch_get_v2([transfer], after()) == {name: [shared] * 2}, name
    for store in stores:
        store.close()
