"""KV events: a router that follows vLLM's ZMQ publisher knows the blocks in host memory and on disk."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine_checks import BLOCK, PAYLOAD, flush, nothing_left, stats
from real_engine import Engine, prompt
from undercroft.compat import event_hash
from undercroft.connector.observe.events import NO_EVENTS

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
Payloads = set[tuple[int, int, str]]
"""Payloads by the part of the hash that events have, group and medium."""


class Router:
    """An index that is built from the batches of vLLM's ZMQ publisher, and from nothing else."""

    def __init__(self, running: Engine, endpoint: str) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self._running = running
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next = 0
        self.payloads: Payloads = set()
        self.tokens: dict[int, tuple[list[int], int | None]] = {}
        self.cleared = 0
        self.told = 0

    def follow(self) -> Payloads:
        """Take all batches up to now; the payloads of undercroft's tiers."""
        publisher = self._running.scheduler.kv_event_publisher
        deadline = time.monotonic() + 30
        while publisher._event_queue.unfinished_tasks:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self._socket.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            assert self._socket.poll(30_000)
            _, _, number, body = self._socket.recv_multipart()
            if not body:
                return self.payloads
            assert int.from_bytes(number, "big") == self._next, "a batch is lost"
            self._next += 1
            for event in self._decoder.decode(body).events:
                self._apply(event)

    def _apply(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.payloads.clear()
            self.cleared += 1
        elif event.medium != "GPU":
            assert (event.locality, event.ownership) == ("LOCAL", None)
            of_event = {(block, event.group_idx, event.medium) for block in event.block_hashes}
            self.told += len(of_event)
            if kind == "BlockStored":
                assert not of_event & self.payloads, "told twice"
                self.payloads |= of_event
                self._note_tokens(event)
            else:
                assert of_event <= self.payloads, "removed, and never told"
                self.payloads -= of_event

    def _note_tokens(self, event: Any) -> None:
        assert event.block_size == BLOCK
        assert len(event.token_ids) in (0, BLOCK * len(event.block_hashes))
        parent = event.parent_block_hash
        for index, block in enumerate(event.block_hashes):
            if event.token_ids:
                self.tokens[block] = event.token_ids[index * BLOCK : (index + 1) * BLOCK], parent
            parent = block

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def route(engine: Make, tmp_path: Path) -> Iterator[Callable[..., tuple[Engine, Router]]]:
    """Starts an engine with a publisher, and a router that follows it."""
    routers: list[Router] = []

    def start(model: Path, undercroft: dict[str, Any], **engine_args: Any) -> tuple[Engine, Router]:
        from vllm.config import KVEventsConfig

        replay = f"ipc://{tmp_path}/r{len(routers)}"
        config = KVEventsConfig(
            enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/p{len(routers)}", replay_endpoint=replay
        )
        running = engine(model, undercroft, kv_events_config=config, **engine_args)
        routers.append(Router(running, replay))
        return running, routers[-1]

    yield start
    for router in routers:
        router.close()


def publish(running: Engine) -> None:
    """Run a request: all changes since the last step are published, and so are all pending events."""
    running.generate(prompt(5), 1)
    running.idle_steps()


def content(running: Engine) -> Payloads:
    """The engine's blocks, node by node: its session, which may share with no other, begins again.

    The router knows all of it then, if it is right, and hears of later changes.
    """
    session = running.connector._scheduler._session
    found: Payloads = set()
    more = restart = True
    while more:
        _, changes, more = session.take_events(restart) or (False, [], False)
        restart = False
        for stored, tier, group, block, _ in changes:
            payload = (event_hash(block), group, "CPU" if tier == "host" else "STORAGE")
            found = found | {payload} if stored else found - {payload}
    return found


def test_a_router_hears_of_blocks_in_host_memory(route: Callable[..., tuple[Engine, Router]], llama: Path) -> None:
    running, router = route(llama, {"host_memory": "64MiB"}, blocks=64)
    ids = prompt(3 * BLOCK + 1)
    running.generate(ids, 1)
    running.idle_steps()
    publish(running)
    assert {medium for _, _, medium in router.follow()} == {"CPU"}
    chain = list(router.tokens.items())
    assert [tokens for _, (tokens, _) in chain] == [ids[at : at + BLOCK] for at in range(0, 3 * BLOCK, BLOCK)]
    assert [parent for _, (_, parent) in chain] == [None, chain[0][0], chain[1][0]]


def disk(path: Path, capacity: str = "36MiB") -> dict[str, Any]:
    return {"host_memory": "32MiB", "disk_path": str(path / "cache"), "disk_capacity": capacity}


OPERATIONS = int(os.environ.get("EVENT_OPERATIONS", "80"))
"""Operations of each seed; `make soak` has more."""
LIVES = 3 + OPERATIONS // 500
"""Starts of the engine among them."""


def operate(running: Engine, chance: random.Random) -> str:
    """Do something at random; its name."""
    family, length = chance.randrange(12), chance.randrange(1, 8)
    ids = prompt(length * BLOCK + 1, seed=family) + prompt(chance.choice([0, BLOCK]), seed=40 + family)
    kind = chance.random()
    if kind < 0.03:
        running.idle_steps()
        assert running.reset_device_cache()
        return "device reset"
    if kind < 0.05:
        running.idle_steps()
        assert running.reset_device_cache(connector=True)
        return "reset"
    if kind < 0.2:
        verb = chance.choice(["prefetch", "pin", "demote", "release"])
        hints = {verb: True, "compute": chance.random() < 0.5}
        running.generate(ids, 1, params={"kv_hints": hints})
        return verb
    running.generate(ids, 1)
    return "prompt"


@pytest.mark.timeout(300 + OPERATIONS)
@pytest.mark.parametrize("seed", range(2))
def test_a_router_knows_the_blocks_of_an_engine_after_random_operations(
    route: Callable[..., tuple[Engine, Router]], llama: Path, tmp_path: Path, seed: int
) -> None:
    """Prompts that share prefixes, tiers that are too small for them, hints, resets and restarts."""
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    for life in range(LIVES):
        running, router = route(llama, disk(tmp_path), blocks=48)
        running.idle_steps()
        assert router.follow() == content(running)
        for _ in range(OPERATIONS * (life + 1) // LIVES - OPERATIONS * life // LIVES):
            kind = operate(running, chance)
            done[kind] += 1
            if chance.random() < 0.2 or "reset" in kind:
                running.idle_steps()
                flush(running)
                publish(running)
                assert router.follow() == content(running), f"after {done.total()} operations, the last one {kind}"
                done["compared"] += 1
        nothing_left(running, reset=False)
        publish(running)
        assert router.follow() == content(running)
        done["evictions"] += stats(running)["host_evictions"] + stats(running)["disk_evictions"]
        done["told"] += router.told
        running.close()
    print(dict(done))
    enough = (done["evictions"] > 5, done["told"] > 150, done["compared"] > 10, done["device reset"] > 0)
    assert enough == (True, True, True, True), done


def test_a_reset_of_the_device_alone_reports_the_tiers_again(
    route: Callable[..., tuple[Engine, Router]], llama: Path
) -> None:
    running, router = route(llama, {"host_memory": "64MiB"}, blocks=64)
    running.generate(prompt(897), 1)
    nothing_left(running, reset=False)
    publish(running)
    before = set(router.follow())
    assert len(before) == 7
    assert running.reset_device_cache()
    assert running.idle_steps() > 0, "an idle vLLM steps until all is told"
    assert (router.follow(), router.cleared) == (before, 1)


def test_a_restart_announces_the_blocks_on_disk(
    route: Callable[..., tuple[Engine, Router]], llama: Path, tmp_path: Path
) -> None:
    first, before = route(llama, disk(tmp_path, "256MiB"), blocks=64)
    first.generate(prompt(897), 1)
    nothing_left(first, reset=False)
    publish(first)
    on_disk = {payload for payload in before.follow() if payload[2] == "STORAGE"}
    assert len(on_disk) == 7
    first.close()
    second, router = route(llama, disk(tmp_path, "256MiB"), blocks=64)
    # No request has come: vLLM's own loop steps as long as the connector has something to tell.
    assert second.idle_steps() > 0
    assert router.follow() == on_disk
    assert router.tokens == {}
    # Promoted for a request, the blocks come to host memory with their tokens.
    ids = prompt(897)
    second.generate(ids, 1)
    second.idle_steps()
    publish(second)
    router.follow()
    assert [tokens for tokens, _ in router.tokens.values()] == [ids[at : at + BLOCK] for at in range(0, 896, BLOCK)]


def test_a_reset_is_reported_and_new_blocks_follow(route: Callable[..., tuple[Engine, Router]], llama: Path) -> None:
    running, router = route(llama, {"host_memory": "64MiB"}, blocks=64)
    running.generate(prompt(897), 1)
    nothing_left(running, reset=False)
    publish(running)
    assert len(router.follow()) == 7
    assert running.reset_device_cache(connector=True)
    running.generate(prompt(3 * BLOCK + 1), 1)
    running.idle_steps()
    publish(running)
    assert len(router.follow()) == 3 == stats(running)["host_used_bytes"] // PAYLOAD
    assert router.cleared > 0


def test_without_events_nothing_is_noted(engine: Make, llama: Path) -> None:
    running = engine(llama, {"host_memory": "64MiB"}, blocks=64)
    running.generate(prompt(897), 1)
    running.idle_steps()
    assert list(running.connector.take_events()) == []
    assert running.connector._events is NO_EVENTS
