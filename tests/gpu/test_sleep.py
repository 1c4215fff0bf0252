"""vLLM's own worker goes to sleep while copies run: they end before the device's memory goes, and go on after it.

The rest of a vLLM on CUDA runs in tests/cuda_vllm.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.worker.gpu_worker import Worker

from fake_config import kv_cache_config, vllm_config
from fake_cuda import Fake
from undercroft.compat import KVConnectorRole
from undercroft.connector.connector import UndercroftConnector
from worker_rank import SMALL_PAGES, Rank

STEPS = 6


class Allocator:
    """vLLM's sleep mode: the KV cache loses its memory and keeps its addresses."""

    def __init__(self, fake: Fake, address: int) -> None:
        self._fake, self._address = fake, address

    def suspend(self, level: int) -> None:
        self._fake.suspend(self._address)

    def resume(self, tags: list[str] | None) -> None:
        if tags is None or "kv_cache" in tags:
            self._fake.resume(self._address)


def sleeping_worker(fake: Fake, rank: Rank) -> Worker:
    worker: Any = object.__new__(Worker)
    worker._sleep_mode_backend = Allocator(fake, rank.cache.pages[0].data_ptr())
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    worker._sleep_saved_parameters = worker._sleep_saved_buffers = worker._sleep_saved_draft_buffers = {}
    worker.synchronize_device = torch.accelerator.synchronize
    return worker  # type: ignore[no-any-return]


@pytest.fixture
def rank(fake: Fake, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """A rank of an engine in the caller's own process, which does not wait for pending saves before it sleeps."""
    rank = Rank(SMALL_PAGES["1B"]._replace(layers=4), device, 300)
    fake.copies_at(-1)
    rank.warm_up()
    connector = UndercroftConnector(vllm_config(), KVConnectorRole.WORKER, kv_cache_config())
    monkeypatch.setattr(connector, "_worker", rank.worker)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    yield rank
    rank.worker.shutdown()
    fake.copies_at(0)


@pytest.mark.parametrize("level", [1, 2])
def test_copies_end_before_sleep_and_resume_after_the_memory_is_back(fake: Fake, rank: Rank, level: int) -> None:
    worker: Any = sleeping_worker(fake, rank)
    worker.model_runner = SimpleNamespace(model=torch.nn.Module())
    worker.get_draft_model = lambda: None
    worker.model_config = SimpleNamespace(sleep_preserve_parameter_names=())
    counted = fake.counts()
    for _ in range(STEPS):
        fake.copies_at(2e8)
        loads, saves = rank.jobs(1, 8), rank.jobs(1, 8)
        rank.step(loads, saves)
        assert loads[0].request_id not in rank.loaded, "the copy is to be under way"
        worker.sleep(level)
        fake.copies_at(-1)
        rank.step()
        assert loads[0].request_id in rank.loaded
        assert saves[0].transfer_id in rank.saved
        assert not rank.failed
        refused = rank.jobs(1, 1)
        rank.step(refused)
        assert rank.failed == {refused[0].request_id}, "there is nothing to load into"
        rank.failed.clear()
        worker.wake_up(["weights"])
        worker.wake_up(["kv_cache"])
        rank.step(again := rank.jobs(1, 8), rank.jobs(1, 8))
        rank.finish()
        assert again[0].request_id in rank.loaded
        assert not rank.failed
    now = fake.counts()
    for what in ("streams", "device_allocations", "host_allocations", "registrations", "unregistrations"):
        assert now[what] == counted[what], what
