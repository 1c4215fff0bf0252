"""undercroft as a tier of vLLM's offloading below models with windows and states: faults of the disk, and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_checks import inject_faults
from full_filesystem import small, take_space
from hybrid_engine import BEST, MODELS, Model
from real_engine import Engine, Generation
from tier_engine import (
    OFFLOADING,
    Make,
    extra_config,
    flip_payload_bytes,
    settled,
    stats,
    tier_of,
    until_no_writes,
)

TOKENS = 8
BLOCKS = 3

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class Tier:
    """Engines of one model with a directory."""

    def __init__(self, engine: Make, model: Model, place: Path, **more: Any) -> None:
        self._engine, self.model = engine, model
        self._options = extra_config(place / "cache", cpu_bytes_to_use=256 << 20, **more)

    def start(self, **arguments: Any) -> Engine:
        settings = {"dtype": self.model.dtype, "blocks": 96, **OFFLOADING, **arguments}
        return self._engine(self.model.directory, self._options, **settings)

    def asked(self, one: Engine, seed: int = 0, *, settle: bool = True, writes: bool = True) -> Generation:
        """The answer to a prompt, after which nothing is held."""
        answer = one.generate(self.model.ids(BLOCKS, extra=9, seed=seed), TOKENS, logprobs=BEST)
        if settle:
            settled(one, writes=writes)
        return answer


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    """A model with windows, and one with states."""
    return Model(request.param, request.getfixturevalue(request.param), *MODELS[request.param])


def test_damaged_bytes_are_computed_and_saved_again(engine: Make, model: Model, tmp_path: Path) -> None:
    tier = Tier(engine, model, tmp_path)
    first = tier.start()
    cold = tier.asked(first)
    first.close()
    flip_payload_bytes(tmp_path / "cache")
    second = tier.start()
    damaged = tier.asked(second)
    assert damaged.cached < BLOCKS * model.block
    assert model.same(damaged, cold)
    assert stats(second)["checksum_failures"] > 0
    second.close()
    third = tier.start()
    again = tier.asked(third)
    assert again.cached == BLOCKS * model.block
    assert model.same(again, cold)
    assert stats(third)["checksum_failures"] == 0


def test_a_disk_that_hangs_or_disappears_costs_hits_only(
    engine: Make, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject_faults(monkeypatch)
    tier = Tier(engine, model, tmp_path, promotion_wait="planned")
    first = tier.start()
    cold = [tier.asked(first, seed) for seed in range(2)]
    first.close()
    second = tier.start()
    assert tier_of(second)._cache.engine.limit_reads(0.0)
    hung = tier.asked(second, settle=False)
    assert hung.cached < BLOCKS * model.block
    assert model.same(hung, cold[0])
    assert tier_of(second)._cache.engine.limit_reads(None)
    settled(second)
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    (tmp_path / "cache").rmdir()
    assert model.same(tier.asked(second, 1), cold[1])
    second.close()
    third = tier.start()
    empty = tier.asked(third)
    assert empty.cached == 0
    assert model.same(empty, cold[0])


def test_a_full_disk_costs_saves_only(engine: Make, model: Model, tmp_path: Path) -> None:
    with small(tmp_path / "filesystem") as filesystem:
        tier = Tier(engine, model, filesystem, disk_capacity="72MiB")
        first = tier.start()
        cold = tier.asked(first)
        take_space(filesystem)
        other = tier.asked(first, 1, writes=False)
        until_no_writes(first)
        again = tier.asked(first, 1, writes=False)
        assert again.cached == BLOCKS * model.block, "vLLM's host memory has it"
        assert model.same(again, other)
        first.close()
        second = tier.start()
        kept, lost = tier.asked(second, writes=False), tier.asked(second, 1, writes=False)
        # The directory is smaller now, and keeps the chunks before its new end: a hit may lack those of a window.
        assert (kept.cached in (0, BLOCKS * model.block), lost.cached) == (True, 0)
        assert model.same(kept, cold)
        assert model.same(lost, other)
        second.close()


def test_two_ranks(engine: Make, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    tier = Tier(engine, model, tmp_path)
    first = tier.start(executor="mp", tensor_parallel_size=2)
    cold, warm = tier.asked(first), tier.asked(first)
    assert (cold.cached, warm.cached) == (0, BLOCKS * model.block)
    assert stats(first)["disk_reads"] == 0, "vLLM's host memory had it"
    first.close()
    second = tier.start(executor="mp", tensor_parallel_size=2)
    again = tier.asked(second)
    assert again.cached == BLOCKS * model.block
    assert stats(second)["disk_reads"] > 0
    assert model.same(warm, cold) and model.same(again, cold)
