"""KV events of undercroft as a tier of vLLM's offloading: a router that follows them knows what the disk and the remote
store have."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_engine import BLOCK
from real_engine import Engine, prompt
from tier_engine import extra_config, settled, stats, tier_of
from undercroft.compat import event_hash

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Make = Callable[..., Engine]


class Router:
    """An index that is built from what vLLM publishes, and from nothing else."""

    def __init__(self) -> None:
        self.on_disk: set[tuple[int, int]] = set()
        self.in_store: set[tuple[int, int]] = set()
        """The remote store."""
        self.tokens: dict[int, list[int]] = {}
        self.cleared = 0

    def publish(self, batch: Any) -> None:
        """In the place of vLLM's publisher."""
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.on_disk.clear()
                self.in_store.clear()
                self.cleared += 1
            elif event.medium == "STORAGE":
                assert event.ownership is None
                known = {"LOCAL": self.on_disk, "REMOTE": self.in_store}[event.locality]
                told = {(block, event.group_idx) for block in event.block_hashes}
                if kind == "BlockStored":
                    assert not told & known, "told twice"
                    known |= told
                    self.tokens[event.block_hashes[-1]] = list(event.token_ids)
                else:
                    assert told <= known, "removed, and never told"
                    known -= told

    def shutdown(self) -> None:
        """As vLLM's publisher."""


def routed(engine: Make, model: Path, options: dict[str, Any]) -> tuple[Engine, Router]:
    """An engine, and a router that has heard of all that was on disk."""
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    one = engine(model, options, connector="OffloadingConnector", kv_events_config=events, blocks=64)
    router = one.scheduler.kv_event_publisher = Router()
    one.idle_steps()
    return one, router


def on_disk(one: Engine) -> set[tuple[int, int]]:
    """What the disk has, as the engine tells a session that begins again; all of it is published afterwards."""
    tier = tier_of(one)
    settled(one)
    one.generate(prompt(5), 1)
    one.idle_steps()
    found: set[tuple[int, int]] = set()
    more = restart = True
    while more:
        _, changes, more = tier._cache.session.take_events(restart) or (False, [], False)
        restart = False
        for stored, place, group, block, _ in changes:
            payload = {(event_hash(block), tier._chunks.engine_groups[group].group)}
            if place == "disk":
                found = found | payload if stored else found - payload
    return found


def test_a_router_knows_the_blocks_on_disk(engine: Make, llama: Path, tmp_path: Path) -> None:
    options = extra_config(tmp_path / "cache", rows=16, disk_capacity="36MiB") | {"self_describing_kv_events": True}
    one, router = routed(engine, llama, options)
    ids = prompt(3 * BLOCK + 1)
    one.generate(ids, 1)
    settled(one)
    one.generate(prompt(5), 1)
    one.idle_steps()
    assert len(router.on_disk) == 3
    assert sorted(router.tokens.values()) == sorted(ids[at : at + BLOCK] for at in range(0, 3 * BLOCK, BLOCK))
    for seed in range(8):
        one.generate(prompt(13 * BLOCK + 1, seed=60 + seed), 1)
        settled(one)
    assert stats(one)["disk_evictions"] > 0
    there = on_disk(one)
    assert len(there) > 30
    assert router.on_disk == there
    one.close()

    second, router = routed(engine, llama, options)
    assert router.on_disk == there, "told before the first request"
    second.generate(ids, 1)
    settled(second)
    there = on_disk(second)
    assert router.cleared > 0, "vLLM's own cache was reset"
    assert router.on_disk == there, "and the disk was told of again"
    assert second.reset_device_cache(connector=True)
    second.generate(prompt(5), 1)
    second.idle_steps()
    assert router.on_disk == set()


def test_a_router_knows_the_blocks_in_the_remote_store(engine: Make, llama: Path, tmp_path: Path) -> None:
    remote = {"remote": f"file://{tmp_path}/remote", "remote_object": "1MiB"}
    one, router = routed(engine, llama, extra_config(tmp_path / "cache", **remote))
    ids = prompt(8 * BLOCK + 1)
    answer = one.generate(ids, 4)
    settled(one)
    deadline = time.monotonic() + 60
    while stats(one)["remote_put_queue_segments"] or not stats(one)["remote_puts"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.generate(prompt(5), 1)
    one.idle_steps()
    written = set(router.in_store)
    assert len(written) == 8
    assert router.on_disk == written
    one.close()

    # Another host: no disk, and nothing told until it has asked the store.
    second, router = routed(engine, llama, extra_config(None, **remote))
    assert router.in_store == set()
    again = second.generate(ids, 4)
    assert (again.cached, again.tokens) == (8 * BLOCK, answer.tokens)
    settled(second)
    second.generate(prompt(5), 1)
    second.idle_steps()
    assert (router.in_store, router.on_disk) == (written, set())
    assert second.reset_device_cache(connector=True)
    second.generate(prompt(5), 1)
    second.idle_steps()
    assert router.in_store == set()


def test_nothing_is_recorded_if_vllm_publishes_no_events(engine: Make, llama: Path, tmp_path: Path) -> None:
    one = engine(llama, extra_config(tmp_path / "cache"), connector="OffloadingConnector", blocks=64)
    assert tier_of(one)._events is None
    assert list(tier_of(one).take_events()) == []
