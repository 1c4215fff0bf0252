"""Copies on streams in the order of hooks of vLLM's own model runners, V1 and V2, on a device that takes its time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker import kv_connector_model_runner_mixin as v1
from vllm.v1.worker.gpu import kv_connector as v2

from fake_config import vllm_config
from kv_caches import allocate, block_content, full, group, plan
from manual_streams import AtOnceExecutor, ManualStreams
from undercroft._core import Arena
from undercroft.compat import KVConnectorRole
from undercroft.connector.connector import UndercroftConnector
from undercroft.connector.metadata import GroupCopy, TransferJob, UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.connector.worker import worker
from undercroft.connector.worker.worker import WorkerConnector
from undercroft.device.cuda import CudaCopier
from undercroft.device.lane import Lanes

NOTHING = UndercroftMetadata("/a", 0)


class Runner:
    """A worker whose model runner calls the hooks of one connector; ``forward`` is the step's work on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str, layout: str, seed: int) -> None:
        self.streams = ManualStreams(seed)
        self.arena = Arena.create(1 << 20)
        self.config = plan(layout, [group("full", 3, full())])
        self.caches = allocate(self.config)

        lanes = Lanes.make(self.streams, thread=lambda name: AtOnceExecutor())

        def copier(device: Any, arena: Arena, pinner: None, gather_below: int) -> CudaCopier:
            return CudaCopier(device, arena, lanes, pinner)

        monkeypatch.setattr(worker, "make_copier", copier)
        config = vllm_config()
        self.connector = UndercroftConnector(config, KVConnectorRole.WORKER, self.config)
        self.connector._worker = WorkerConnector(config, self.config, attach=lambda socket, session: self.arena)
        module = {"V1": v1, "V2": v2}[version]
        monkeypatch.setattr(module, "get_kv_transfer_group", lambda: self.connector)
        monkeypatch.setattr(module, "get_forward_context", lambda: None)
        if version == "V1":
            self.connector.register_kv_caches(self.caches)
            self.step = self._step_v1
        else:
            monkeypatch.setattr(v2, "is_forward_context_available", lambda: True)
            self.active = v2.ActiveKVConnector(config, self.caches)
            self.step = self._step_v2

    def _step_v1(self, metadata: UndercroftMetadata, forward: Callable[[], None] = lambda: None) -> Any:
        self.connector.handle_preemptions(metadata)
        output = _scheduled(metadata)
        with v1.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as answer:
            forward()
        return answer

    def _step_v2(self, metadata: UndercroftMetadata, forward: Callable[[], None] = lambda: None) -> Any:
        batch: Any = SimpleNamespace(idx_mapping=None, req_ids=["r"], num_tokens=1)
        self.active.pre_forward(_scheduled(metadata), batch)
        forward()
        self.active.finish_forward()
        return self.active.post_forward(set())

    def fill(self, block: int, value: int) -> None:
        """Queue a write of the model to a block."""

        def write() -> None:
            for view in self.caches.values():
                view[block].copy_(torch.full_like(view[block], value))

        self.streams.run(self.streams.model, write)

    def until_answered(self) -> Any:
        """Empty steps, the device running on between them, until one of them reports something."""
        for _ in range(10_000):
            answer = self.step(NOTHING)
            if answer.finished_recving or answer.kv_connector_worker_meta:
                return answer
            assert self.streams.step(), "the device has done all, and nothing was reported"
        raise AssertionError("no answer")

    def block(self, block: int) -> list[bytes]:
        return block_content(self.config, self.caches, 0, block)


def _scheduled(metadata: UndercroftMetadata) -> Any:
    return SimpleNamespace(kv_connector_metadata=metadata, has_sync_kv_loads=False, finished_req_ids=set())


def job(number: int, block: int, slot: int, request: str = "r") -> TransferJob:
    return TransferJob(number, request, 0, [GroupCopy(0, np.array([block]), np.array([slot]))])


@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_saves_and_loads_follow_the_model(monkeypatch: pytest.MonkeyPatch, version: str, layout: str) -> None:
    for seed in range(5):
        one = Runner(monkeypatch, version, layout, seed)
        answer = one.step(UndercroftMetadata("/a", 0, saves=[job(7, 2, 8192)]), lambda r=one: r.fill(2, 1))
        assert answer.kv_connector_worker_meta is None, "acknowledged before the device has copied anything"
        answer = one.until_answered()
        assert answer.kv_connector_worker_meta == UndercroftWorkerMetadata({7: 1})

        # Acknowledged: the block may be written again at once.
        expected = one.block(2)
        one.step(NOTHING, lambda r=one: r.fill(2, 2))

        def forward(r: Runner = one) -> None:
            r.fill(2, 0)  # vLLM zeroes the blocks that it has just allocated

        answer = one.step(UndercroftMetadata("/a", 0, loads=[job(8, 2, 8192, "x")]), forward)
        assert not answer.finished_recving
        answer = one.until_answered()
        assert (answer.finished_recving, answer.failed_recving) == ({"x"}, set())
        assert one.block(2) == expected
        stats = one.connector.get_kv_connector_stats()
        assert stats is None or "hook_errors" not in stats.data.get("counters", {})
        one.connector.shutdown()


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_sleep_ends_the_copies_first(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    one = Runner(monkeypatch, version, "LBHNC", 3)
    one.step(UndercroftMetadata("/a", 0, saves=[job(7, 2, 0)]), lambda: one.fill(2, 5))
    one.connector.unregister_kv_caches()
    assert not any(queue.work for queue in one.streams.queues[1:]), "copies are still queued on memory that is going"
    assert one.step(NOTHING).kv_connector_worker_meta == UndercroftWorkerMetadata({7: 1})
    one.connector.restore_kv_caches()
    one.step(UndercroftMetadata("/a", 0, loads=[job(8, 4, 0, "x")]))
    assert one.until_answered().finished_recving == {"x"}
    assert one.block(4) == one.block(2)
