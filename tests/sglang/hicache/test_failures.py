"""No error of undercroft ends a thread of SGLang: each call answers as after a miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer, count_pool_hits

from host_pools import after, fill, indices, keys, mha, opened, wipe, wrong
from served_client import until
from undercroft import engine
from undercroft.embed import Cache
from undercroft.errors import ServerError
from undercroft.log import LogOnce
from undercroft.sglang_hicache import UndercroftHiCache, prefixes
from undercroft.sglang_hicache.stats import Stats
from undercroft.sglang_hicache.store import PoolStore

CHAIN = keys("a", 4)
PLACES = indices(SimpleNamespace(page_size=16), range(4))
SEVERAL = [PoolTransfer(PoolName.KV, PLACES, keys=CHAIN), PoolTransfer(PoolName.INDEXER, PLACES, keys=CHAIN)]
NONE = [False] * 4
CALLS: dict[str, tuple[Callable[[UndercroftHiCache], Any], Any]] = {
    "batch_exists": (lambda store: store.batch_exists(CHAIN, after()), 0),
    "batch_exists_v2": (lambda store: store.batch_exists_v2(CHAIN, SEVERAL, after()).kv_hit_pages, 0),
    "batch_get_v1": (lambda store: store.batch_get_v1(CHAIN, PLACES, after()), NONE),
    "batch_set_v1": (lambda store: store.batch_set_v1(CHAIN, PLACES, after()), NONE),
    "batch_get_v2": (lambda store: store.batch_get_v2(SEVERAL, extra_info=after()), {"kv": NONE, "indexer": NONE}),
    "batch_set_v2": (lambda store: store.batch_set_v2(SEVERAL, extra_info=after()), {"kv": NONE, "indexer": NONE}),
    "exists": (lambda store: store.exists(CHAIN[0]), False),
    "clear": (lambda store: store.clear(), None),
    "get_stats": (lambda store: store.get_stats(), None),
    "close": (lambda store: store.close(), None),
    "weights_change": (lambda store: store.weights_change(), None),
}
INSIDE = [
    *((PoolStore, name) for name in ("leading", "held", "get", "set", "reset", "stop_saves")),
    *((Cache, "close"), (Stats, "take")),
]


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a bug"), ServerError("the server has gone")], ids=lambda e: str(e)
)
@pytest.mark.parametrize("method", CALLS)
def test_an_error_is_a_miss_and_is_said_once(
    method: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    store = opened(tmp_path, mha())
    call, answer = CALLS[method]
    with monkeypatch.context() as patch:
        for owner, name in INSIDE:
            patch.setattr(owner, name, fails)
        assert call(store) == answer
        said = caplog.text
        assert f"caught {type(error).__name__}" in said
        assert ("Traceback" in said) == (type(error) is ZeroDivisionError), "a bug is found by its place"
        assert call(store) == answer
        assert caplog.text.count("caught ") == said.count("caught ")
    store.close()
    again = opened(tmp_path, mha())
    assert not again._engine.is_shared, "the engine is closed, also after an error of a pool"
    again.close()


def test_a_pool_whose_load_failed_is_no_hit() -> None:
    """SGLang takes a pool that an answer leaves out for one whose pages are all there."""
    assert count_pool_hits(CALLS["batch_get_v2"][1]) == {"kv": 0, "indexer": 0}
    assert "indexer" not in count_pool_hits({"kv": NONE})


def test_a_radix_tree_that_fails_gives_the_ancestors_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Tree:
        tree_core = SimpleNamespace()

        def get_prefix_hash_values(self, _: int) -> list[str]:
            return ["a", "b"]

    monkeypatch.setattr(prefixes, "_log_once", LogOnce())
    monkeypatch.setattr(unified_radix_cache, "UnifiedRadixCache", Tree)
    assert prefixes.complete() is None
    for _ in range(2):
        assert Tree().get_prefix_hash_values(7) == ["a", "b"]
    assert caplog.text.count("does not say which pages") == 1


def test_calls_end_in_time_while_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = engine.engine_options
    monkeypatch.setattr(
        engine, "engine_options", lambda *args, **more: options(*args, **more) | {"inject_faults": True}
    )
    pool = mha()
    store = opened(tmp_path, pool)
    assert store.batch_set_v1(CHAIN, fill(pool, range(4), CHAIN), after()) == [True] * 4
    store.close()
    store = opened(tmp_path, pool)
    assert store._engine.limit_reads(0)
    assert store.batch_exists(CHAIN, after()) == 4, "the index knows them"
    assert store.batch_get_v1(CHAIN, wipe(pool, range(4)), after()) == NONE
    assert wrong(pool, range(4), CHAIN) == [0, 1, 2, 3], "nothing is written where nothing was found"
    more = keys("b", 4)
    assert store.batch_set_v1(more, fill(pool, range(4), more), after()) == [True] * 4, "there is memory for them"
    assert store._engine.limit_reads(None)
    until("pages come again", lambda: all(store.batch_get_v1(CHAIN, wipe(pool, range(4)), after())))
    assert wrong(pool, range(4), CHAIN) == []
    store.close()
