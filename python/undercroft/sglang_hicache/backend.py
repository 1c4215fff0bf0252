"""SGLang's storage back end (``HiCacheStorage``, SGLang 0.5.23, ``sglang/srt/mem_cache/hicache_storage.py``).

SGLang calls it on threads of its own for prefetches and backups. Each host pool has a namespace of its own, because
SGLang saves a model's pools in separate calls, and in an order of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from undercroft.embed.memory import with_small_memory
from undercroft.engine import close_engine, open_engine, start_line
from undercroft.errors import UndercroftError
from undercroft.fail_open import fail_open, fail_open_with, nothing
from undercroft.identity.weights import Digests, digests_file
from undercroft.log import LogOnce, logger
from undercroft.sglang_hicache import identity, options, prefixes, weight_updates
from undercroft.sglang_hicache.pools import Pool
from undercroft.sglang_hicache.stats import Stats
from undercroft.sglang_hicache.store import PoolStore
from undercroft.sglang_hicache.writes import Writes

if TYPE_CHECKING:
    import torch

    from undercroft._core import Engine

_TIMEOUT_S = 3.0
"""Longest wait of a call for loads or saves. Pages that are late are misses, or are not kept. SGLang gives its threads
ten seconds to end what they do before it drops its caches, and does not survive more: several calls must fit."""
_RESET_TIMEOUT_S = 5.0
_FIND_TIMEOUT_S = 1.0
"""Longest wait of a call for answers of a server or a remote store about pages."""
_PREFIX_KEYS = "hicache_storage_pass_prefix_keys"


def _none(keys: list[str], *_: Any, **__: Any) -> list[bool]:
    """The answer that no page is there, or is kept."""
    return [False] * len(keys)


def _none_of_several(transfers: list[Any], *_: Any, **__: Any) -> dict[str, list[bool]]:
    """The same for several pools. SGLang takes a pool that is left out for one whose pages are all there."""
    return {one.name: _none(one.keys or []) for one in transfers}


class UndercroftHiCache(HiCacheStorage):
    """undercroft's disk, server and remote store below SGLang's host memory. All methods may be called from any
    thread. After the pools are registered none raises but those that SGLang does not call (`_not_available`): a
    failure is a miss, or a page that is not kept."""

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
        self._passes_prefixes = False
        """Whether SGLang has passed prefixes. It then leaves out empty ones in some calls."""
        self._stats = Stats()
        self._digests = Digests(digests_file(self._config.disk_path))
        self._arguments = _arguments()
        self._off = identity.why_off(self._arguments) or weight_updates.watch(self, self._arguments)
        if self._off is not None:
            logger.warning("undercroft is off, SGLang serves without it: %s.", self._off)
        elif error := prefixes.complete():
            logger.warning(
                "undercroft loads only prompts of which SGLang has nothing in memory, since this SGLang has another "
                "radix tree (%s); SGLang 0.5.23 is supported.",
                error,
            )

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
        is_first = name == PoolName.KV
        if self._off is not None or not (is_first or self._engine is not None):
            return
        try:
            pool = Pool(name, host_pool)
            description = identity.describe(self._storage_config, self._arguments, self._config, self._digests, pool)
        except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
            logger.warning("undercroft keeps no pages of SGLang's pool %s, whose memory it cannot use: %s", name, error)
            return
        except OSError as error:  # a weight file that cannot be read
            self._turn_off(str(error))
            return
        with self._lock:
            if is_first:
                self._open(pool, description)
            assert self._engine is not None
            try:
                # An engine of another process takes one session.
                is_own = not (self._config.server or self._engine.is_shared)
                engine = self._engine if is_first or is_own else open_engine(self._config)
                # Other pools are saved before this one, which waits for them, too.
                writes = Writes(engine) if is_first else None
                owns_engine = engine is not self._engine
                store = PoolStore(engine, description, pool, self._page_tokens, writes=writes, owns_engine=owns_engine)
                self._stores[pool.name] = store
            except UndercroftError as error:
                if is_first:
                    raise
                logger.warning("undercroft keeps no pages of SGLang's pool %s: %s", name, error)
            self._digests.save()

    def _open(self, pool: Pool, description: str) -> None:
        """Open the engine for the first pool."""
        self._page_tokens = pool.page_tokens
        config = self._storage_config
        ranks = 1 if config.is_mla_model else config.tp_size
        self._config = with_small_memory(self._config, config.extra_config, ranks * sum(pool.parts))
        self._engine = open_engine(self._config)
        for model in identity.known_by_name(description):
            logger.warning(
                "undercroft: the weights of %s lie where undercroft cannot read them. Other weights under this name "
                "would find this cache: change namespace_salt or model_id with the weights.",
                model,
            )
        if info := self._engine.info():
            logger.info(start_line(info, ""))

    def _turn_off(self, why: str) -> None:
        self._off = why
        logger.warning("undercroft is off, SGLang serves without it: %s.", why)

    @fail_open(nothing)
    def weights_change(self) -> None:
        """Keep and load nothing from now on: pages in SGLang's memory may be of the old weights or of the new ones."""
        self._turn_off("SGLang changes its weights; it needs a restart with the new ones (docs/sglang.md)")
        with contextlib.ExitStack() as all_stopped:
            for store in self._open_stores():
                all_stopped.callback(store.stop_saves)

    def _report(self, method: str, error: Exception) -> None:
        """Log the first error of its kind that was caught in a method; with its traceback, unless it is one of the
        errors that the engine has for failures outside it."""
        self._log_once(
            logging.ERROR,
            (method, type(error)),
            "undercroft: caught %s in %s: %s. SGLang goes on as after a miss. Further errors of this kind are not "
            "logged.",
            type(error).__name__,
            method,
            error,
            error=None if isinstance(error, UndercroftError) else error,
        )

    def _open_stores(self) -> list[PoolStore]:
        with self._lock:
            return list(self._stores.values())

    def _store(self, name: Any) -> PoolStore | None:
        return self._stores.get(str(name)) if self._off is None else None

    # Pages of the KV pool

    @fail_open(int)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first key on can be loaded. ``extra_info.prefix_keys``: the keys before them."""
        return self._leading(keys, extra_info, time.monotonic() + _FIND_TIMEOUT_S)

    def _leading(self, keys: list[str], extra_info: Any, until: float) -> int:
        store = self._store(PoolName.KV)
        return store.leading(self._before(extra_info), keys, until) if store is not None else 0

    @staticmethod
    def _before(extra_info: Any) -> list[str]:
        # SGLang leaves out an empty prefix here.
        return list(getattr(extra_info, "prefix_keys", None) or ())

    @fail_open_with(_none)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into the KV pool. Returns for each whether it is there."""
        until = time.monotonic() + _TIMEOUT_S
        return self._move(PoolName.KV, keys, host_indices, extra_info, until, is_load=True)

    @fail_open_with(_none)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Keep pages of the KV pool. Returns for each whether it is kept."""
        until = time.monotonic() + _TIMEOUT_S
        return self._move(PoolName.KV, keys, host_indices, extra_info, until, is_load=False)

    # Pages of several pools

    @fail_open(lambda: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How many pages from the first key on can be loaded with what the other pools need for them."""
        until = time.monotonic() + _FIND_TIMEOUT_S
        prefix, found = self._before(extra_info), self._leading(keys, extra_info, until)
        hits: dict[str, int] = {PoolName.KV: found} if found else {}
        restorable = set(range(1, found + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # It never limits the hit.
            fitting = self._fitting(transfer, prefix, keys[:found], until)
            if fitting:
                hits[transfer.name] = max(fitting)
            restorable &= fitting
        pages = sorted(restorable)
        return PoolTransferResult(pages[-1] if pages else 0, hits, pages)

    def _fitting(self, transfer: Any, prefix: list[str], keys: list[str], until: float) -> set[int]:
        """The numbers of leading pages for which a pool has what it needs."""
        store = self._store(transfer.name)
        if store is None:
            return set()
        if not store.pool.is_trailing:
            return {*range(1, store.leading(prefix, keys, until) + 1)}
        is_last_only = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        count = max(1, len(transfer.keys or ())) if is_last_only else len(keys)
        return _ends(store.held(keys, until), len(keys), count)

    @fail_open_with(_none_of_several)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages into other pools."""
        return self._move_several(transfers, extra_info, is_load=True)

    @fail_open_with(_none_of_several)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Keep pages of other pools."""
        return self._move_several(transfers, extra_info, is_load=False)

    def _move_several(self, transfers: list[Any], extra_info: Any, *, is_load: bool) -> dict[str, list[bool]]:
        until = time.monotonic() + _TIMEOUT_S
        return {
            one.name: self._move(one.name, one.keys or [], one.host_indices, extra_info, until, is_load=is_load)
            for one in transfers
        }

    def _move(
        self, name: Any, keys: list[str], host_indices: Any, extra_info: Any, until: float, *, is_load: bool
    ) -> list[bool]:
        found = self._placed(name, keys, host_indices, extra_info)
        if found is None:
            return [False] * len(keys)
        store, prefix = found
        began = time.monotonic()
        done = (store.get if is_load else store.set)(prefix, keys, host_indices, until)
        pages = sum(done)
        self._stats.note(pages, pages * store.page_bytes, time.monotonic() - began, is_load=is_load)
        return done

    def _placed(
        self, name: Any, keys: list[str], host_indices: Any, extra_info: Any
    ) -> tuple[PoolStore, list[str]] | None:
        """A pool's store and the keys before ``keys``, if pages can be loaded and kept."""
        store = self._store(name)
        if store is None or not keys:
            return None
        prefix = getattr(extra_info, "prefix_keys", None)
        self._passes_prefixes |= prefix is not None
        if not self._passes_prefixes:
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
        return store, list(prefix or ())

    # The rest of the interface

    @fail_open(nothing)
    def clear(self) -> None:
        """Drop everything of this model, at the latest after some seconds."""
        until = time.monotonic() + _RESET_TIMEOUT_S
        are_durable = [self._clear_pool(store, until) for store in self._open_stores()]
        if not all(are_durable):
            logger.warning(
                "undercroft: not all pages are cleared durably yet, and a restart may find some of them. Until then "
                "pages are kept for this process only."
            )

    @fail_open(bool)
    def _clear_pool(self, store: PoolStore, until: float) -> bool:
        return store.reset(until)

    @fail_open(nothing)
    def get_stats(self) -> Any:
        """The loads and saves since the last call, as SGLang's ``StorageMetrics``."""
        return self._stats.take()

    @fail_open(nothing)
    def close(self) -> None:
        """Finish writes in flight (bounded), and release directories and memory. Idempotent."""
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
            engine, self._engine = self._engine, None
        with contextlib.ExitStack() as all_closed:
            if engine is not None:
                all_closed.callback(close_engine, engine)
            for store in stores:
                all_closed.callback(store.cache.close)

    # SGLang calls these with other interfaces only.

    def exists(self, key: str) -> bool:
        """Whether a page without a prefix can be loaded."""
        return self.batch_exists([key]) == 1

    def _not_available(self, *_: Any, **__: Any) -> Any:
        """Not available: see `options.parse`."""
        raise NotImplementedError("undercroft: interface_v1 is 1, so SGLang calls batch_get_v1 and batch_set_v1")

    get = set = batch_get = batch_set = _not_available


def _ends(held: set[int], found: int, count: int) -> set[int]:
    """The lengths of prefixes, at most ``found`` pages, whose last ``count`` pages are held, or all if they are
    fewer."""
    ends, run = set(), 0
    for number in range(found):
        run = run + 1 if number in held else 0
        if run >= min(count, number + 1):
            ends.add(number + 1)
    return ends


def _arguments() -> Any:
    """SGLang's arguments; None outside its server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None
