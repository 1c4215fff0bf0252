"""Loads and saves that nobody wants any more are no failures: each documented reason counts by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from core_values import Group, granted
from undercroft import _core
from undercroft.metrics import METRICS

BLOCK = 16
HASHES = [bytes([number]) * 32 for number in range(1, 9)]
[GIVEN_UP] = [metric for metric in METRICS if metric.name == "given_up_transfers"]
FAILURES = ("load_failures", "save_failures", "checksum_failures", "host_checksum_failures")


class Running(NamedTuple):
    """A session with a load of four blocks and a save of the next four under way."""

    engine: _core.Engine
    session: _core.Session
    load: int
    save: int

    def counts(self) -> dict[str, int]:
        """All transfers that were given up, by their statistic; none failed."""
        stats = self.engine.stats()
        assert {name: stats[name] for name in FAILURES} == dict.fromkeys(FAILURES, 0)
        return {name: stats[name] for name in GIVEN_UP.sources if stats[name]}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    engine = _core.Engine({"host_memory": 16 << 20, "disks": [], "socket": str(tmp_path / "s")})
    session = engine.register('{"model": "given up"}', [Group("full", BLOCK, 4096)], BLOCK)
    saved = granted(session, session.begin_save("first", HASHES[:4], 4 * BLOCK))
    session.end_transfer(saved.transfer_id, True)
    assert session.lookup("loads", HASHES[:4]).tokens == 4 * BLOCK
    load = session.begin_load("loads", 0, 4 * BLOCK)
    save = granted(session, session.begin_save("saves", HASHES, 8 * BLOCK))
    assert load is not None and save.extents
    yield Running(engine, session, load.transfer_id, save.transfer_id)
    engine.close()


@pytest.mark.parametrize(("direction", "reason"), GIVEN_UP.sources.values())
def test_each_reason_counts_by_itself(running: Running, direction: str, reason: str) -> None:
    if reason == "closed":
        running.session.close()
        assert running.counts() == {"given_up_loads_closed": 1, "given_up_saves_closed": 1}
        return
    running.session.give_up(running.load if direction == "load" else running.save, reason)
    assert running.counts() == {f"given_up_{direction}s_{reason}": 1}


def test_another_reason_is_refused(running: Running) -> None:
    with pytest.raises(ValueError, match="bored"):
        running.session.give_up(running.save, "bored")


ORDERS = {
    "clear": {"clear": {"what": "all", "erase": False}},
    "resize": {"resize": {"host_bytes": 4 << 20}},
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_an_order_lets_copies_end_well(running: Running, order: dict) -> None:
    """Clearing and resizing give nothing up: what is being copied ends as if nobody had asked."""
    _core.operate(running.engine.arena.socket, order)
    for transfer in (running.load, running.save):
        running.session.end_transfer(transfer, True)
    assert running.counts() == {}
    stats = running.engine.stats()
    assert (stats["loads"], stats["saves"]) == (0, 0)
