"""Saves that outrun the disk wait for it, within bounds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from host_pools import after, fill, keys, mha, no_addresses, opened, wipe, wrong
from undercroft.sglang_hicache import store as store_module
from undercroft.sglang_hicache import writes
from undercroft.sglang_hicache.writes import Writes

MIB = 1 << 20


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_burst_that_outruns_the_disk_is_written(is_whole: bool, tmp_path: Path) -> None:
    pool = mha(heads=32)
    if is_whole:
        pool.get_page_buffer_meta = no_addresses
    # Half of host memory holds a third of the pages.
    prompts = [keys(f"prompt {number}", 48) for number in range(24 * MIB // pool.get_data_page(0).nbytes // 48)]
    assert len(prompts) == 4
    limits = {"host_memory": "16MiB", "disk_capacity": "64MiB", "disk_write_rate": "6MiB"}
    store = opened(tmp_path, pool, **limits)
    for chain in prompts:
        assert all(store.batch_set_v1(chain, fill(pool, range(48), chain), after()))
    assert store._engine is not None
    assert store._engine.flush(60.0)
    store.close()
    store = opened(tmp_path, pool, **limits)
    for chain in prompts:
        assert store.batch_get_v1(chain, wipe(pool, range(48)), after()) == [True] * 48
        assert wrong(pool, range(48), chain) == []
    store.close()


def test_a_prompt_larger_than_host_memory_is_kept(tmp_path: Path) -> None:
    pool = mha(heads=32)
    chain = keys("long", 48 * 8)
    assert len(chain) * pool.get_data_page(0).nbytes >= 3 * 16 * MIB
    store = opened(tmp_path, pool, host_memory="16MiB", disk_capacity="96MiB")
    for at in range(0, len(chain), 48):
        piece = chain[at : at + 48]
        assert all(store.batch_set_v1(piece, fill(pool, range(48), piece), after(chain[:at])))
    store.close()
    store = opened(tmp_path, pool, host_memory="16MiB", disk_capacity="96MiB")
    for at in range(0, len(chain), 48):
        piece = chain[at : at + 48]
        assert all(store.batch_get_v1(piece, wipe(pool, range(48)), after(chain[:at])))
        assert wrong(pool, range(48), piece) == []
    store.close()


class Disk:
    """An engine with 1,000 MiB of memory, its disk, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.queued, self.speed, self.questions = 0.0, 0.0, 0.0, 0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.pass_time)
        monkeypatch.setattr(writes, "time", clock)
        self.engine: Any = SimpleNamespace(stats=lambda: {"host_capacity_bytes": 1_000 * MIB})
        self.writes = Writes(self.engine)
        monkeypatch.setattr(self.writes, "_queued", self.ask)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.queued = max(0.0, self.queued - seconds * self.speed * MIB)

    def ask(self) -> float:
        self.questions += 1
        return self.queued

    def save(self, mib: int, limit_s: float = 5.0) -> float:
        """Save so much. Returns the seconds waited."""
        began = self.now
        self.writes.wait(mib * MIB, self.now + limit_s)
        self.queued += mib * MIB
        return self.now - began


def test_saves_wait_no_longer_than_the_disk_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    disk.speed = 100
    assert [disk.save(100) for _ in range(4)] == [0.0] * 4
    assert disk.save(100) == pytest.approx(1.0, abs=0.1)
    assert disk.save(50) == pytest.approx(0.5, abs=0.1)


def test_pieces_are_not_single_pages_before_an_engine_elsewhere_reports_its_memory() -> None:
    told: dict[str, int] = {}
    waits = Writes(SimpleNamespace(stats=lambda: told))  # type: ignore[arg-type]
    assert waits.piece == 16 * MIB
    told["host_capacity_bytes"] = 1_000 * MIB
    assert waits.piece == 100 * MIB


def test_small_saves_ask_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    for _ in range(300):
        assert disk.save(1) == 0.0
    assert disk.questions < 12


def test_one_hanging_disk_costs_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    for _ in range(4):
        disk.save(100)
    assert disk.save(100) == pytest.approx(5.0, abs=0.1)
    assert [disk.save(100) for _ in range(10)] == [0.0] * 10
    disk.speed = 100
    disk.pass_time(13.0)
    assert disk.save(100) == 0.0
    assert disk.save(250) == pytest.approx(1.5, abs=0.1), "the disk writes again"


def test_under_lasting_load_saves_wait_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    disk.speed = 10
    waited, began = 0.0, disk.now
    while disk.now < 600:
        waited += disk.save(100)
        disk.queued = min(disk.queued, 500 * MIB)  # the engine refuses more
        disk.pass_time(0.1)
    assert waited == pytest.approx((disk.now - began) / 2 + 15, rel=0.1)


def test_the_saves_of_an_operation_share_their_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, chain, clock = mha(), keys("a", 12), SimpleNamespace(now=100.0)
    store = opened(tmp_path, pool)
    kept = store._stores["kv"]
    until: list[float] = []
    waits = SimpleNamespace(wait=lambda _, limit: until.append(limit), piece=1 << 30)
    monkeypatch.setattr(kept, "_writes", waits)
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def save(of: list[str], before: list[str]) -> None:
        kept.set(before, of, fill(pool, range(len(of)), of), clock.now + 3.0)

    save(chain[:4], [])
    clock.now += 3.0
    save(chain[4:8], chain[:4])
    clock.now += 1.0
    save(chain[8:], chain[:8])
    save(keys("b", 4), [])
    clock.now += 60.0
    save(keys("b", 8)[4:], keys("b", 4))
    assert until == [103.0, 105.0, 105.0, 107.0, 167.0]
    store.close()
