"""How much the driver is asked for, by the worker as vLLM calls it: on caches of 40 GiB, prompts of 128k tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fake_cuda import Fake
from undercroft.device.lane import STAGING_BYTES
from undercroft.device.pinning import chunk_bytes
from worker_rank import MODELS, SMALL_PAGES, Model, Rank

BATCH = 128
"""Most copies of a batch, which the core cuts (`CopyBatches`). Behind so many it records an event."""


def check_cut(spent: dict[str, int], batches: int, events: int) -> None:
    """``batches`` and ``events``: without the core's cuts."""
    cuts = spent["descriptors"] // BATCH
    assert batches <= spent["batches"] <= batches + cuts
    assert events <= spent["events_recorded"] <= events + cuts


@pytest.fixture
def moves_nothing(fake: Fake) -> Iterator[None]:
    """Copies of tens of GiB are only counted."""
    fake.copies_at(-1)
    yield
    fake.copies_at(0)
    torch.cuda.empty_cache()


def chunks_of(model: Model, blocks: int, gathered: bool) -> int:
    """Gathered pages fill one half of the staging buffer after the other."""
    return -(-blocks // (STAGING_BYTES // (1 + gathered) // (model.page * model.layers)))


def launches(model: Model, blocks: int) -> int:
    """Kernels that move the pages of so many blocks. The table of each has room for 96 pages and 120 blocks, or for
    more blocks and fewer pages."""
    half = STAGING_BYTES // 2 // (model.page * model.layers)
    chunks = [min(half, blocks - begin) for begin in range(0, blocks, half)]
    groups = [min(96, model.layers - begin) for begin in range(0, model.layers, 96)]
    return sum(-(-chunk // (504 - 4 * pages)) for chunk in chunks for pages in groups)


@pytest.mark.usefixtures("moves_nothing")
@pytest.mark.parametrize("direction", ["load", "save"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_of_128k_tokens_costs_one_batch_or_one_and_a_few_kernels_for_each_chunk_of_small_pages(
    fake: Fake, device: torch.device, name: str, direction: str
) -> None:
    model = MODELS[name]
    blocks = (128 << 10) // model.tokens
    gathered = name in SMALL_PAGES
    chunks = chunks_of(model, blocks, gathered)
    rank = Rank(model, device, blocks)
    part = rank.worker._layout.groups[0]
    assert (part.span > part.shard_bytes) == (model.ranks > 1 and not gathered), "other ranks' heads lie in between"
    rank.warm_up()
    jobs = rank.jobs(1, blocks)
    before = fake.counts()
    here = fake.during(lambda: rank.step(**{f"{direction}s": jobs}), here=True)
    rank.finish()
    assert not rank.failed
    assert here == {"events_recorded": 1}, "the model runner's thread asks the driver for nothing else"
    spent = {key: now - before[key] for key, now in fake.counts().items() if now != before[key]}
    pieces = blocks if gathered or model.layout == "BLHNC" else blocks * model.layers
    assert spent["descriptors"] <= pieces + chunks * len(range(0, rank.arena.size, chunk_bytes(rank.arena.size)))
    # With gathered pages: kernels, and events between the two streams: two for each chunk.
    check_cut(spent, chunks if gathered else 1, 2 + gathered * 2 * chunks)
    others = {key: value for key, value in spent.items() if key not in ("descriptors", "batches", "events_recorded")}
    assert others == ({"launches": launches(model, blocks)} if gathered else {})
    rank.worker.shutdown()


@pytest.mark.usefixtures("moves_nothing")
@pytest.mark.parametrize("direction", ["load", "save"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_many_requests_is_one_job(fake: Fake, device: torch.device, name: str, direction: str) -> None:
    rank = Rank(MODELS[name], device, 64)
    rank.warm_up()
    jobs = rank.jobs(16, 1)
    before = fake.counts()
    here = fake.during(lambda: rank.step(**{f"{direction}s": jobs}), here=True)
    rank.finish()
    assert here == {"events_recorded": 1}
    spent = {key: now - before[key] for key, now in fake.counts().items()}
    gathered = name in SMALL_PAGES
    chunks = chunks_of(rank.model, 16, gathered)
    assert spent["launches"] == launches(rank.model, 16) * gathered
    assert spent["single_copies"] == 0
    # One event for the step, one at the end of each chunk, and those between the two streams.
    between = 2 * chunks * gathered
    check_cut(spent, chunks, 1 + chunks + between)
    rank.worker.shutdown()


@pytest.mark.usefixtures("moves_nothing")
def test_one_request_that_cannot_be_copied_fails_alone(device: torch.device) -> None:
    rank = Rank(SMALL_PAGES["1B"], device, 64)
    rank.warm_up()
    jobs = rank.jobs(3, 2)
    jobs[1].groups[0].offsets[1] = rank.arena.size
    rank.step(loads=jobs)
    rank.finish()
    assert rank.loaded >= {job.request_id for job in jobs}
    assert rank.failed == {jobs[1].request_id}
    rank.worker.shutdown()


@pytest.mark.usefixtures("moves_nothing")
def test_a_small_load_does_not_wait_for_the_large_one_behind_it(fake: Fake, device: torch.device) -> None:
    rank = Rank(SMALL_PAGES["1B"], device, 300)
    rank.warm_up()
    (small,), (large,) = rank.jobs(1, 1), rank.jobs(1, 299)
    fake.copies_at(1e9)
    rank.step(loads=[small, large])
    while small.request_id not in rank.loaded:
        rank.step()
        time.sleep(0.001)
    assert large.request_id not in rank.loaded
    rank.finish()
    assert large.request_id in rank.loaded and not rank.failed
    rank.worker.shutdown()


@pytest.mark.usefixtures("moves_nothing")
def test_copiers_come_and_go_and_nothing_new_is_allocated(fake: Fake, device: torch.device) -> None:
    rank = Rank(SMALL_PAGES["1B"], device, 64)
    rank.warm_up()
    before = fake.counts()
    for _ in range(12):
        rank.worker.unregister_kv_caches()
        rank.worker.restore_kv_caches()
        rank.step(rank.jobs(1, 40), rank.jobs(1, 40))
        rank.finish()
    for session in range(1, 13):
        rank.step(rank.jobs(1, 40, session), rank.jobs(1, 40, session), session)
        rank.finish()
    assert rank.attached == 13
    after = fake.counts()
    for what in ("streams", "device_allocations", "host_allocations", "registrations", "unregistrations"):
        assert after[what] == before[what], what
    model = torch.cuda.Stream(device)
    for lane in (rank.worker._copier._pinned[True], rank.worker._copier._pinned[False], rank.worker._copier._unpinned):
        assert lane._lane.handle != model
    rank.worker.shutdown()


@pytest.mark.usefixtures("moves_nothing")
def test_every_registration_is_undone(fake: Fake, device: torch.device) -> None:
    before = fake.registered_ranges()
    rank = Rank(SMALL_PAGES["1B"], device, 300)
    rank.warm_up()
    assert fake.registered_ranges() > before + 1
    rank.worker.shutdown()
    assert fake.registered_ranges() == before


@pytest.mark.usefixtures("moves_nothing")
def test_a_lost_server_does_not_hold_up_the_model_for_unpinning(fake: Fake, device: torch.device) -> None:
    before = fake.registered_ranges()
    rank = Rank(SMALL_PAGES["1B"], device, 300)
    rank.warm_up()
    rank.arena.is_served = False
    # The driver takes its time to unpin, as it does for 64 GiB.
    fake.unregisters_in(0.5)
    here = fake.during(rank.step, here=True)
    assert "unregistrations" not in here
    assert fake.registered_ranges() > before, "the step has returned while the driver still unpins"
    fake.unregisters_in(0)
    rank.worker.shutdown()
    assert fake.registered_ranges() == before


ALONE = """
import sys
sys.path[:0] = {paths!r}
import torch
from fake_cuda import Fake
from worker_rank import SMALL_PAGES, Rank
torch.cuda.set_device(1)
fake = Fake()
fake.copies_at(-1)
rank = Rank(SMALL_PAGES["1B"], torch.device("cuda", 1), 300)
rank.step(rank.jobs(1, 20), rank.jobs(1, 20))
rank.warm_up()
rank.step(rank.jobs(4, 20), rank.jobs(4, 20))
rank.finish()
rank.worker.shutdown()
print(fake.violations(), fake.has_context(0), fake.has_context(1))
"""


@pytest.mark.usefixtures("fake")
def test_a_rank_makes_a_context_on_its_own_device_only() -> None:
    here = Path(__file__).parent
    paths = [str(here), *(str(here.parent / name) for name in ("unit", "fake_cuda"))]
    environment = {**os.environ, "FAKE_CUDA_OWN_DEVICE": "1"}
    script = ALONE.format(paths=paths)
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[] False True"
