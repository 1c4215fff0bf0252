"""Two workers in processes of their own, a device each, and a real server, as in production, checked to the byte.

Both know the same arena, and each has its half of every payload.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fake_cuda
from serve_process import ServeProcess
from served_client import Peer, until
from undercroft import _core
from undercroft.connector.metadata import GroupCopy, TransferJob, UndercroftMetadata
from undercroft.connector.worker.worker import WorkerConnector
from undercroft.device.synthetic import synthetic_cache

LAYERS, PAGE, BLOCKS = 4, 4096, 40
PAYLOAD = 2 * LAYERS * PAGE
START_TIMEOUT_S = 240
"""A process imports vLLM first."""

pytestmark = pytest.mark.timeout(600)


class Rank:
    """A worker in a process of its own; its methods run there."""

    def __init__(self, rank: int) -> None:
        torch.cuda.set_device(rank)
        self._rank = rank
        self._cache = synthetic_cache(PAGE, BLOCKS, LAYERS, "LBHNC", torch.device("cuda", rank))
        parallel = SimpleNamespace(rank=rank, tensor_parallel_size=2)
        model = SimpleNamespace(get_total_num_kv_heads=lambda: 2)
        vllm_config: Any = SimpleNamespace(parallel_config=parallel, model_config=model)
        self._worker = WorkerConnector(vllm_config, self._cache.config)
        self._worker.register_kv_caches(self._cache.views)

    def content(self, value: int) -> np.ndarray:
        return np.random.default_rng((value, self._rank)).integers(-128, 128, (LAYERS, PAGE), dtype=np.int8)

    def fill(self, block: int, value: int) -> None:
        for pages, row in zip(self._cache.pages, self.content(value), strict=True):
            pages[block].copy_(torch.from_numpy(row))

    def holds(self, block: int, value: int) -> bool:
        found = np.stack([pages[block].cpu().numpy() for pages in self._cache.pages])
        return bool((found == self.content(value)).all())

    def step(self, metadata: UndercroftMetadata) -> float:
        """Seconds of the model runner's thread."""
        begin = time.perf_counter()
        self._worker.start_load_kv(metadata)
        self._worker.wait_for_save(metadata)
        return time.perf_counter() - begin

    def results(self) -> tuple[set[str], set[str], set[int], set[int]]:
        """Loads that have ended, loads that have failed, and the same of saves, once no copy runs."""
        if self._worker._copier is not None:
            self._worker._copier.drain()
        loads = self._worker.get_transfer_results(set())
        saves = self._worker.build_connector_worker_meta()
        ended, failed = (set(saves.saves_ended), saves.saves_failed) if saves is not None else (set(), set())
        return loads.finished_recving, loads.failed_recving, ended, failed

    def sleep(self) -> None:
        self._worker.unregister_kv_caches()

    def wake_up(self) -> None:
        self._worker.restore_kv_caches()

    def wait_until_pinned(self) -> None:
        assert self._worker._arena.attached is not None
        assert self._worker._arena.attached.pinner is not None
        assert self._worker._arena.attached.pinner.wait(60)

    def driver(self) -> dict[str, Any]:
        """The fake driver's counts and violations."""
        if not fake_cuda.is_loaded():
            return {}
        fake = fake_cuda.Fake()
        contexts = [device for device in range(2) if fake.has_context(device)]
        return {"violations": fake.violations(), "contexts": contexts, "ranges": fake.registered_ranges()} | {
            name: count for name, count in fake.counts().items() if name in ("registrations", "streams")
        }

    def shutdown(self) -> None:
        self._worker.shutdown()


def _serve(rank: int, pipe: Any) -> None:
    os.environ["FAKE_CUDA_OWN_DEVICE"] = str(rank)
    worker = Rank(rank)
    pipe.send(None)
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send(getattr(worker, name)(*arguments))
        except Exception as error:
            pipe.send(error)


class Ranks:
    """Both processes. Every method is called in each of them; the answers come in their order."""

    def __init__(self) -> None:
        self._made = [self._start(rank) for rank in range(2)]
        for rank in range(2):
            self._wait_for(rank)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> list[Any]:
            for _, pipe in self._made:
                pipe.send((name, arguments))
            answers = [pipe.recv() for _, pipe in self._made]
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        return call

    def replace(self, rank: int) -> None:
        """Kill one of them, and start another in its place."""
        self.kill(rank)
        self._made[rank] = self._start(rank)
        self._wait_for(rank)

    def kill(self, rank: int) -> None:
        process, pipe = self._made[rank]
        process.kill()
        process.join()
        pipe.close()

    @staticmethod
    def _start(rank: int) -> tuple[Any, Any]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(rank, there), daemon=True)
        process.start()
        return process, here

    def _wait_for(self, rank: int) -> None:
        _, pipe = self._made[rank]
        assert pipe.poll(START_TIMEOUT_S)
        assert pipe.recv() is None


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    both = Ranks()
    yield both
    assert both.driver() == [{}, {}] or [seen["contexts"] for seen in both.driver()] == [[0], [1]]
    both.shutdown()
    assert all(seen.get("ranges", 0) == 0 and not seen.get("violations") for seen in both.driver())
    for rank in range(2):
        both.kill(rank)


class Scheduler:
    """Orders the same jobs from both ranks."""

    def __init__(self, ranks: Ranks, socket: Path) -> None:
        self.ranks = ranks
        self.peer = Peer(_core.Engine({"server": f"unix://{socket}"}))
        self.number = 0

    def step(self, loads: dict[int, int] | None = None, saves: dict[int, int] | None = None) -> bool:
        """Load and save blocks (block: slot). Whether all of it succeeded on both ranks."""
        address = self.peer.engine.arena
        jobs = []
        for blocks in (loads, saves):
            self.number += 1
            slots = np.array(list((blocks or {}).values()), dtype=np.int64) * PAYLOAD
            copies = [GroupCopy(0, np.array(list(blocks or {}), dtype=np.int64), slots)]
            jobs.append([TransferJob(self.number, f"r{self.number}", address.session, copies)] if blocks else [])
        self.took = max(self.ranks.step(UndercroftMetadata(address.socket, address.arena_id, address.session, *jobs)))
        good = True
        for ended_loads, failed_loads, ended_saves, failed_saves in self.ranks.results():
            assert ended_loads == {job.request_id for job in jobs[0]}
            assert ended_saves == {job.transfer_id for job in jobs[1]}
            good = good and not failed_loads and not failed_saves
        return good

    def save_and_load(self, value: int) -> None:
        """The bytes saved from some blocks are loaded into others."""
        for block in range(1, 13):
            self.ranks.fill(block, value + block)
        assert self.step(saves={block: block for block in range(1, 13)})
        assert self.step(loads={block + 20: block for block in range(1, 13)})
        for block in range(1, 13):
            assert self.ranks.holds(block + 20, value + block) == [True, True]


def test_ranks_go_on_after_sleep_a_new_session_and_each_others_death(ranks: Ranks, tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "s") as server:
        scheduler = Scheduler(ranks, server.socket)
        scheduler.save_and_load(100)
        ranks.wait_until_pinned()
        scheduler.save_and_load(200)
        pinned = ranks.driver()

        ranks.sleep()
        assert not scheduler.step(loads={1: 1}), "there is no memory to load into"
        ranks.wake_up()
        scheduler.save_and_load(300)

        first = scheduler.peer.engine.arena
        other = Scheduler(ranks, server.socket)
        assert other.peer.engine.arena.session != first.session
        other.save_and_load(400)
        assert ranks.driver() == pinned, "the arena was pinned again although it is the same one"

        ranks.replace(1)
        other.save_and_load(500)


def test_a_lost_server_costs_no_time_and_the_next_one_is_used(ranks: Ranks, tmp_path: Path) -> None:
    socket = tmp_path / "s"
    with ServeProcess(socket) as server:
        scheduler = Scheduler(ranks, socket)
        scheduler.save_and_load(100)
        ranks.wait_until_pinned()
        server.close()
        assert not scheduler.step(saves={1: 1})
    with ServeProcess(socket):
        lost = scheduler.peer.engine.arena.arena_id
        until("another server", lambda: scheduler.peer.is_up() and scheduler.peer.engine.arena.arena_id != lost)
        scheduler.save_and_load(200)
