"""A worker on a device, driven through the hooks that vLLM's model runner calls, on KV caches of 40 GiB."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from undercroft._core import Arena
from undercroft.connector.metadata import GroupCopy, TransferJob, UndercroftMetadata
from undercroft.connector.worker.worker import WorkerConnector
from undercroft.device.synthetic import SyntheticCache, synthetic_cache

CACHE = 40 << 30


class Model(NamedTuple):
    """The KV cache of one rank."""

    layout: str
    layers: int
    page: int
    tokens: int
    """Tokens of a block."""
    ranks: int = 1
    """Ranks of tensor parallelism: with large pages in the layout LBHNC they share payloads."""

    @property
    def blocks(self) -> int:
        return CACHE // (self.page * self.layers)

    @property
    def slot(self) -> int:
        return -(-self.page * self.layers * self.ranks // 4096) * 4096

    @property
    def heads(self) -> int:
        """Heads of keys and values on this rank: each has 128 numbers of 16 bits."""
        return self.page // (self.tokens * 2 * 128 * 2)


SMALL_PAGES = {
    "70B on 8 ranks": Model("LBHNC", 80, 8 << 10, 16, ranks=8),
    "1B": Model("LBNHC", 16, 16 << 10, 16),
}
"""Models whose pages are gathered."""
MODELS = {
    **SMALL_PAGES,
    "8B": Model("LBNHC", 32, 64 << 10, 16),
    "one of two ranks": Model("LBHNC", 32, 32 << 10, 16, ranks=2),
    "one of eight ranks": Model("LBHNC", 16, 32 << 10, 64, ranks=8),
    "MLA": Model("LBNHC", 61, 72 << 10, 64),
    "blocks outermost": Model("BLHNC", 32, 64 << 10, 16),
}


class Sparse:
    """An arena of any size, without memory behind it. Its engine runs until the test ends it."""

    def __init__(self, size: int) -> None:
        self._arena = Arena.create(1 << 20)
        self._file = os.memfd_create("sparse")
        os.ftruncate(self._file, size)
        self._mapping = mmap.mmap(self._file, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.size = size
        self.is_served = True

    def fileno(self) -> int:
        return self._file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arena, name)

    def prefault(self, offset: int, size: int) -> None:
        pass


class Rank:
    """A worker on one device, whose hooks are called as vLLM's model runner does."""

    def __init__(self, model: Model, device: torch.device, slots: int) -> None:
        self.model = model
        self.cache: SyntheticCache = synthetic_cache(model.page, model.blocks, model.layers, model.layout, device)
        self.arena = Sparse(slots * model.slot)
        self.attached = 0
        if model.ranks > 1:
            self.cache.config.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
                block_size=model.tokens, num_kv_heads=model.heads, head_size=128, dtype=torch.bfloat16
            )
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=model.ranks),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: model.heads * model.ranks),
            device_config=SimpleNamespace(device_type="cuda"),
        )
        self.worker = WorkerConnector(vllm_config, self.cache.config, attach=self._attach)
        self.worker.register_kv_caches(self.cache.views)
        self.random = np.random.default_rng(0)
        self.next = 0
        self.loaded: set[str] = set()
        self.saved: set[int] = set()
        self.failed: set[str | int] = set()

    def _attach(self, socket: str, session: int) -> Any:
        self.attached += 1
        return self.arena

    def jobs(self, count: int, blocks: int, session: int = 0) -> list[TransferJob]:
        """Jobs of so many blocks each, scattered over device and arena."""
        ids = self.random.permutation(np.arange(1, self.model.blocks))[: count * blocks]
        slots = self.random.permutation(self.arena.size // self.model.slot)[: count * blocks] * self.model.slot
        self.next += count
        parts = zip(np.split(ids, count), np.split(slots, count), strict=True)
        return [
            TransferJob(self.next + nth, f"r{self.next + nth}", session, [GroupCopy(0, *part)])
            for nth, part in enumerate(parts)
        ]

    def step(self, loads: list[TransferJob] = (), saves: list[TransferJob] = (), session: int = 0) -> None:
        metadata = UndercroftMetadata("/socket", 0, session, list(loads), list(saves))
        self.worker.start_load_kv(metadata)
        self.worker.wait_for_save(metadata)
        self._collect()

    def finish(self) -> None:
        """Wait for all copies."""
        if self.worker._copier is not None:
            self.worker._copier.drain()
        self._collect()

    def _collect(self) -> None:
        results = self.worker.get_transfer_results(set())
        self.loaded |= results.finished_recving
        self.failed |= results.failed_recving
        answer = self.worker.build_connector_worker_meta()
        if answer is not None:
            self.saved |= answer.saves_ended.keys()
            self.failed |= answer.saves_failed

    def warm_up(self) -> None:
        """Attach, pin, and have every buffer made."""
        self.step(self.jobs(1, 1), self.jobs(1, 1))
        pinner = self.worker._arena.attached.pinner
        assert pinner.wait(60) and pinner.pinned_bytes == self.arena.size
        self.step(self.jobs(1, 1), self.jobs(1, 1))
        self.finish()
