"""SGLang's storage back end (``HiCacheStorage``, SGLang 0.5.23, ``sglang/srt/mem_cache/hicache_storage.py``).

SGLang calls it on threads of its own for prefetches and backups, with at most 128 pages at a time. Each host pool has a
namespace of its own, because SGLang saves a model's pools in separate calls, and in an order of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from undercroft.connector.weights import Digests, digests_file
from undercroft.embed import with_small_memory
from undercroft.engine import open_engine, start_line
from undercroft.log import LogOnce, logger
from undercroft.sglang_hicache import identity, options, weight_updates
from undercroft.sglang_hicache.pools import Pool
from undercroft.sglang_hicache.stats import Stats
from undercroft.sglang_hicache.store import PoolStore

if TYPE_CHECKING:
    import torch

    from undercroft._core import Engine

_RESET_TIMEOUT_S = 5.0
_PREFIX_KEYS = "hicache_storage_pass_prefix_keys"


class UndercroftHiCache(HiCacheStorage):
    """undercroft's disk, server and remote store below SGLang's host memory. All methods may be called from any
    thread. No failure of a disk or server raises: it is a miss, or a page that is not kept."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """``storage_config``: SGLang's ``HiCacheStorageConfig``. Raises ConfigError for a wrong option."""
        self._config = options.parse(storage_config.extra_config)
        self._storage_config = storage_config
        self._log_once = LogOnce()
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._stores: dict[str, PoolStore] = {}
        """By the pool's name."""
        self._page_tokens = 0
        """Tokens of a key."""
        self._is_private = False
        self._stats = Stats()
        self._digests = Digests(digests_file(self._config.disk_path))
        self._arguments = _arguments()
        self._off = identity.why_off(self._arguments) or weight_updates.watch(self)
        if self._off is not None:
            logger.warning("undercroft is off, SGLang serves without it: %s.", self._off)

    # The pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the cache for the pages of ``mem_pool_host``. Raises ConfigError or StoreError."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Keep the pages of another pool, too, such as a window's or states. Raises ConfigError or StoreError."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._register(host_pool_name, host_pool)

    def _register(self, name: Any, host_pool: Any) -> None:
        if self._off is not None:
            return
        pool = Pool(name, host_pool)
        try:
            description = identity.describe(self._storage_config, self._arguments, self._config, self._digests, pool)
        except OSError as error:  # a weight file that cannot be read
            self._off = str(error)
            logger.warning("undercroft is off, SGLang serves without it: %s.", error)
            return
        with self._lock:
            if self._engine is None:
                self._page_tokens = pool.page_tokens
                given = self._storage_config.extra_config or {}
                self._engine = open_engine(with_small_memory(self._config, given, sum(pool.parts)))
                for model in identity.known_by_name(description):
                    logger.warning(
                        "undercroft: the weights of %s lie where undercroft cannot read them. Other weights under this "
                        "name would find this cache: change namespace_salt or model_id with the weights.",
                        model,
                    )
            store = PoolStore(self._engine, description, pool, self._page_tokens)
            self._stores[pool.name] = store
            if self._is_private:
                store.make_private()
            if pool.name == PoolName.KV.value and (info := self._engine.info()):
                logger.info(start_line(info, store.cache.session.namespace))
            self._digests.save()

    def weights_change(self) -> None:
        """Keep pages from now on for this process only: another would take them for pages of the weights as loaded."""
        with self._lock:
            if not self._is_private:
                logger.info(
                    "undercroft: SGLang changes its weights; until it restarts, no other process finds the pages that "
                    "it keeps from now on (docs/sglang.md)."
                )
            self._is_private = True
            stores = list(self._stores.values())
        for store in stores:
            store.make_private()

    # Pages of the KV pool

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first key on can be loaded. ``extra_info.prefix_keys``: the keys before them."""
        store = self._stores.get(PoolName.KV.value)
        # SGLang leaves out an empty prefix here.
        prefix = list(getattr(extra_info, "prefix_keys", None) or ())
        return store.leading(prefix, keys) if store is not None else 0

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into the KV pool. Returns for each whether it is there."""
        return self._get(PoolName.KV, keys, host_indices, extra_info)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Keep pages of the KV pool. Returns for each whether it is kept."""
        return self._set(PoolName.KV, keys, host_indices, extra_info)

    # Pages of several pools

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How many pages from the first key on can be loaded with what the other pools need for them."""
        prefix = list(getattr(extra_info, "prefix_keys", None) or ())
        found = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: found} if found else {}
        restorable = set(range(1, found + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # It never limits the hit, and undercroft keeps no such pools.
            store = self._stores.get(str(transfer.name))
            if store is None:
                fitting: set[int] = set()
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                held = store.held(prefix, keys[:found])
                count = max(1, len(transfer.keys or ()))
                fitting = {
                    end for end in range(1, found + 1) if all(at in held for at in range(max(0, end - count), end))
                }
            else:
                fitting = set(range(1, store.leading(prefix, keys[:found]) + 1))
            if fitting:
                hits[transfer.name] = max(fitting)
            restorable &= fitting
        pages = sorted(restorable)
        return PoolTransferResult(pages[-1] if pages else 0, hits, pages)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages into other pools."""
        return {one.name: self._get(one.name, one.keys or [], one.host_indices, extra_info) for one in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Keep pages of other pools."""
        return {one.name: self._set(one.name, one.keys or [], one.host_indices, extra_info) for one in transfers}

    def _get(self, name: Any, keys: list[str], host_indices: Any, extra_info: Any) -> list[bool]:
        found = self._placed(name, keys, host_indices, extra_info)
        if found is None:
            return [False] * len(keys)
        store, prefix = found
        began = time.monotonic()
        done = store.get(prefix, keys, host_indices)
        self._stats.loaded(sum(done), store.page_bytes, time.monotonic() - began)
        return done

    def _set(self, name: Any, keys: list[str], host_indices: Any, extra_info: Any) -> list[bool]:
        found = self._placed(name, keys, host_indices, extra_info)
        if found is None:
            return [False] * len(keys)
        store, prefix = found
        began = time.monotonic()
        done = store.set(prefix, keys, host_indices)
        self._stats.saved(sum(done), store.page_bytes, time.monotonic() - began)
        return done

    def _placed(
        self, name: Any, keys: list[str], host_indices: Any, extra_info: Any
    ) -> tuple[PoolStore, list[str]] | None:
        """A pool's store and the keys before ``keys``, if pages can be loaded and kept."""
        store = self._stores.get(str(name))
        if store is None or not keys:
            return None
        prefix = getattr(extra_info, "prefix_keys", None)
        if prefix is None:
            self._log_once(
                logging.WARNING,
                _PREFIX_KEYS,
                'undercroft keeps and loads nothing, since SGLang passes no prefixes: add "%s": true to %s.',
                _PREFIX_KEYS,
                options.PLACE,
            )
            return None
        if host_indices is None or len(host_indices) != len(keys) * store.pool.page_tokens:
            self._log_once(
                logging.ERROR,
                ("indices", str(name)),
                "undercroft: SGLang gave %s places for %d pages of the pool %s; the pages are left out",
                "no" if host_indices is None else len(host_indices),
                len(keys),
                name,
            )
            return None
        return store, list(prefix)

    # The rest of the interface

    def clear(self) -> None:
        """Drop everything of this model, at the latest after some seconds."""
        stores = list(self._stores.values())
        are_durable = [store.cache.reset(_RESET_TIMEOUT_S) for store in stores]
        if not all(are_durable):
            logger.warning("undercroft: not all pages are cleared durably yet; a restart may find some of them")

    def get_stats(self) -> Any:
        """The loads and saves since the last call, as SGLang's ``StorageMetrics``."""
        return self._stats.take()

    def close(self) -> None:
        """Finish writes in flight (bounded), and release directories and memory. Idempotent."""
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
            engine, self._engine = self._engine, None
        for store in stores:
            store.cache.close()
        if engine is not None:
            engine.close()

    # SGLang calls these with other interfaces only.

    def exists(self, key: str) -> bool:
        """Whether a page without a prefix can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Not available: see `options.parse`."""
        raise NotImplementedError("undercroft: SGLang's option interface_v1 is 1, so it calls batch_get_v1")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not available: see `options.parse`."""
        raise NotImplementedError("undercroft: SGLang's option interface_v1 is 1, so it calls batch_set_v1")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Not available: see `options.parse`."""
        raise NotImplementedError("undercroft: SGLang's option interface_v1 is 1, so it calls batch_get_v1")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not available: see `options.parse`."""
        raise NotImplementedError("undercroft: SGLang's option interface_v1 is 1, so it calls batch_set_v1")


def _arguments() -> Any:
    """SGLang's arguments; None outside its server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None
