"""A model that only the workers can see to be unsupported: vLLM goes on without undercroft, and waits for nothing."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from fake_config import vllm_config
from fake_core import FakeEngine
from fake_vllm import FakePool, Request, scheduler_output
from kv_caches import allocate, full, mixed_group, plan, scheduler_config
from undercroft.compat import KVConnectorRole
from undercroft.connector import wiring
from undercroft.connector.connector import UndercroftConnector
from undercroft.connector.groups import why_unsupported
from undercroft.connector.metadata import GroupCopy, TransferJob, UndercroftMetadata
from undercroft.log import logger


def mixed_config():
    """A group of full attention and of hidden states, which vLLM shows to the scheduler as full attention."""
    hidden = HiddenStateCacheSpec(block_size=16, num_kv_heads=3, head_size=16, dtype=torch.bfloat16)
    config = plan("LBHNC", [mixed_group("layers", [full(), full(), hidden])])
    config.hash_block_size = config.cache_hit_alignment_tokens = 16
    return config


class Halves:
    """The scheduler's and the worker's half over one mixed configuration."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(wiring, "open_engine", lambda config, ranks: FakeEngine())
        config = mixed_config()
        self.scheduler = UndercroftConnector(vllm_config(), KVConnectorRole.SCHEDULER, scheduler_config(config))
        self.worker = UndercroftConnector(vllm_config(), KVConnectorRole.WORKER, config)
        self.worker.register_kv_caches(allocate(config))
        self.pool = FakePool()
        self.scheduler.bind_gpu_block_pool(self.pool)

    def step(self, meta):
        """The worker's hooks of one step, and the scheduler's hook for their results."""
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        output = SimpleNamespace(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=set(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        return results

    def prefill(self, request):
        """A request without a hit, whose blocks vLLM frees at its end."""
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        tables = {request.request_id: (self.pool.allocate(3),)}
        meta = self.scheduler.build_connector_meta(scheduler_output({request.request_id: request.num_tokens}, tables))
        self.scheduler.request_finished_all_groups(request, tables[request.request_id])
        self.pool.free_ids(tables[request.request_id][0])
        return meta


def request(name, seed=0):
    made = Request(name, [seed * 1000 + at for at in range(40)])
    made.sampling_params = SimpleNamespace(extra_args=None)
    return made


def test_saves_are_acknowledged_as_failed_and_keep_no_block(monkeypatch):
    logged = []
    monkeypatch.setattr(logger, "log", lambda level, message, *args, **_: logged.append((level, message % args)))
    halves = Halves(monkeypatch)
    for seed, name in enumerate("ab"):
        meta = halves.prefill(request(name, seed))
        assert meta.saves
        assert halves.scheduler.has_pending_push_work()
        halves.step(meta)
        assert not halves.scheduler.has_pending_push_work()
        assert not halves.scheduler.has_pending_block_frees()
        assert halves.pool.reset_prefix_cache(), "a device block is still referenced"
    again = request("again")
    halves.scheduler.on_new_request(again)
    assert halves.scheduler.get_num_new_matched_tokens(again, 0) == (0, False), "a failed save is no hit"
    (error,) = [message for level, message in logged if level >= logging.ERROR]
    assert "HiddenStateCacheSpec" in error


def test_loads_are_reported_as_failed(monkeypatch):
    halves = Halves(monkeypatch)
    job = TransferJob(1, "a", 0, [GroupCopy(0, np.array([1]), np.array([0]))])
    results = halves.step(UndercroftMetadata(loads=[job], failed_loads=["b"]))
    assert results.finished_recving == results.failed_recving == {"a", "b"}


def test_sleep_and_shutdown_find_nothing_to_do(monkeypatch):
    halves = Halves(monkeypatch)
    halves.worker.get_handshake_metadata()
    halves.worker.unregister_kv_caches()
    halves.worker.restore_kv_caches()
    halves.worker.shutdown()
    assert halves.worker._counts.collect() == {}


@pytest.mark.parametrize("view", [scheduler_config, lambda config: config], ids=["scheduler", "worker"])
def test_both_halves_decline_extracted_hidden_states(view):
    config = vllm_config()
    config.speculative_config = SimpleNamespace(method="extract_hidden_states")
    assert "extract_hidden_states" in why_unsupported(config, view(mixed_config()))
