"""Random requests, aborts, resets and failures over vLLM's own scheduler: no wrong KV, no stall, nothing left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from modelled_vllm import VOCABULARY, Vllm, continuation, vllm

pytestmark = pytest.mark.vllm

LENGTH = 320
"""Most tokens of a request. The device holds one request of this length at least."""
OPTIONS = {"host_memory": "16MiB", "promotion_wait": "complete", "min_load_tokens": 1}


class Clients:
    """The requests of many clients, and the tokens that each must get."""

    def __init__(self, one: Vllm, chance: random.Random) -> None:
        self._one = one
        self._chance = chance
        # More than the device holds.
        self._trunks = [self._tokens(200) for _ in range(10)]
        self._sent: dict[str, tuple[list[int], int]] = {}
        self._sessions: dict[str, list[tuple[list[int], int]]] = {}

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(VOCABULARY) for _ in range(count)]

    def _prompt(self, longest: int = 160) -> list[int]:
        begin = self._chance.choice([5, 16, 17, 33, 64, 65, 96, 100, 130, 160])
        return self._chance.choice(self._trunks)[: min(begin, longest)] + self._tokens(
            self._chance.choice([0, 1, 10, 40])
        )

    def sends(self) -> None:
        """A request arrives."""
        name, ids, count = f"r{len(self._sent)}", self._prompt(), self._chance.choice([1, 5, 20, 60])
        self._sent[name] = ids, count
        salt = self._chance.choice(["x", "y"]) if self._chance.random() < 0.1 else None
        self._one.add(name, ids, count, priority=self._chance.randrange(3), cache_salt=salt)

    def aborts(self) -> None:
        """A client aborts its request."""
        live = [request.request_id for request in self._one.scheduler.requests.values() if not request.is_finished()]
        if live:
            self._one.abort(self._chance.choice(live))

    def speaks(self) -> None:
        """A session with streaming input begins, or goes on."""
        name = f"s{self._chance.randrange(4)}"
        turns = self._sessions.setdefault(name, [])
        request = self._one.scheduler.requests.get(name)
        is_over = bool(turns) and (request is None or request.is_finished())
        if is_over or sum(len(ids) + count for ids, count in turns) > LENGTH - 100:
            return
        turn = self._prompt(longest=40), self._chance.choice([1, 3, 20])
        turns.append(turn)
        self._one.add(name, *turn, resumable=True)

    def pauses(self) -> None:
        """A trainer pauses vLLM and clears the device's cache, while loads and saves are under way. vLLM refuses this
        while sessions hold blocks."""
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self._one.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self._one.drain()
        if not any(request.resumable for request in scheduler.requests.values()):
            assert scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=self._chance.random() < 0.3
            )
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def end(self) -> None:
        """Let all sessions and requests end, and compare their tokens."""
        for name in self._sessions:
            if (request := self._one.scheduler.requests.get(name)) and not request.is_finished():
                self._one.add(name, [0], 1)
        self._one.run()
        for name, turns in self._sessions.items():
            tokens: list[int] = []
            wanted: list[int] = []
            for ids, count in turns:
                tokens = [*tokens[:-1], *ids]
                wanted += (new := continuation(tokens, count))
                tokens += new
            assert self._one.outputs[name] == wanted[: len(self._one.outputs[name])], name
        for name, (ids, count) in self._sent.items():
            got = self._one.outputs[name]
            assert got == continuation(ids, count)[: len(got)], name
            assert len(got) == count or self._one.finished[name] == "abort", name


def serve(one: Vllm, chance: random.Random, steps: int, sessions: bool) -> None:
    """Serve random clients."""
    clients = Clients(one, chance)
    for _ in range(steps):
        happens = chance.random()
        if happens < 0.2:
            clients.sends()
        elif happens < 0.22 and sessions:
            clients.speaks()
        elif happens < 0.25:
            clients.aborts()
        elif happens < 0.26:
            for _ in range(60):
                one.step()
        elif happens < 0.275:
            # vLLM refuses while blocks are in use.
            one.scheduler.reset_prefix_cache(reset_connector=happens > 0.272)
        elif happens < 0.28:
            clients.pauses()
        else:
            one.step()
    clients.end()
    assert one.blocks_in_use() == 0
    assert not one.scheduler.requests
    ours = one.scheduler.connector
    assert ours._scheduler.idle()
    stats = ours._engine.stats()
    assert (stats["loads"], stats["saves"], stats["active_lookups"]) == (0, 0, 0)
    assert not ours._counts.collect().get("counters", {}).get("hook_errors")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "shape",
    [
        {"kinds": "f", "blocks": 24},
        {"kinds": "f", "blocks": 24, "ahead": 1, "ranks": 2},
        {"kinds": "f", "blocks": 26, "ahead": 1, "drafts": 3},
        {"kinds": "wf", "blocks": 46, "ahead": 1},
        {"kinds": "wf", "blocks": 46, "drafts": 3, "ranks": 2},
        {"kinds": "Fw", "blocks": 46, "ahead": 1},
        {"kinds": "fc", "blocks": 46},
        {"kinds": "wfc", "blocks": 66, "ahead": 1},
        {"kinds": "sf", "blocks": 46, "ahead": 1, "ranks": 2},
    ],
    ids=lambda shape: " ".join(f"{value}" for value in shape.values()),
)
def test_no_wrong_kv_and_no_stall(llama: Path, tmp_path: Path, shape: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    faults = {"delay": chance.choice([0.0, 0.5, 0.9]), "load": chance.choice([0.0, 0.3]), "submit": 0.02}
    options: dict[str, Any] = dict(OPTIONS)
    if seed == 0:
        options |= {"disk_path": str(tmp_path / "cache"), "disk_capacity": "64MiB"}
    budget, policy = chance.choice([32, 96, 256]), chance.choice(["fcfs", "priority"])
    with vllm(
        llama,
        options,
        chance,
        faults=faults,
        max_model_len=LENGTH,
        max_num_batched_tokens=budget,
        scheduling_policy=policy,
        **shape,
    ) as one:
        serve(one, chance, steps=250, sessions="drafts" not in shape)
