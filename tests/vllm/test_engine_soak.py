"""A soak of real engines: random requests, aborts and resets; each answer is compared with that of vLLM alone.

`make soak-engine` runs it for `SOAK_SECONDS` a kind of model, from the seed `SOAK_SEED`; `SOAK_KIND` names some kinds.
The tests of each change take some seconds a kind. The requests follow from the seed; when a copy ends does not.
`SOAK_ALONE=1` runs vLLM without undercroft, to compare how much memory each keeps.
"""

from __future__ import annotations

import gc
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from connector_engine import worker
from engine_checks import nothing_left, stats
from mixed_requests import KINDS, Answer, Kind, answered, make_items, start
from real_engine import Engine

SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
SEED = int(os.environ.get("SOAK_SEED", "7"))
WANTED = os.environ.get("SOAK_KIND", "").split() or list(KINDS)
if unknown := set(WANTED) - set(KINDS):
    raise ValueError(
        f"SOAK_KIND={' '.join(sorted(unknown))}: give some of {', '.join(KINDS)}, with spaces between them"
    )
ALONE = os.environ.get("SOAK_ALONE", "") not in ("", "0")
IS_LONG = SECONDS >= 60
STUCK_S = 120
"""Most processor time until all requests have ended: a machine that is busy with other work takes longer."""
PROGRESS_S = 60
SLOW_S = 15
"""Longest time for which copies are slow. A save that takes a minute counts as failed."""
LEAK_BYTES = 20 << 10
"""Most memory that a request may leave behind, once the tiers are full."""
FEW_REQUESTS = 500
"""Below this number of requests, and in a short run, memory is not judged: tiers and torch's own pools still fill."""
FAILURES = ("load_failures", "save_failures", "checksum_failures", "host_checksum_failures")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(SECONDS * 2 + 1200)]


class Rest(NamedTuple):
    """A moment without requests."""

    requests: int
    """Requests so far."""
    resident: int
    """Bytes of the process in memory."""
    descriptors: int


class Soak:
    """One engine under random events."""

    def __init__(self, kind: Kind, root: Path, directory: Path, seed: int) -> None:
        self._kind = kind
        self._chance = random.Random(seed)
        count = kind.items if IS_LONG else kind.items // 4
        self._items = answered(kind, root, make_items(kind, self._chance, count))
        waits = self._chance.choice(["complete", "planned", "best_effort"])
        options = {"host_memory": kind.host_memory, "promotion_wait": waits, "min_load_tokens": 1}
        disk = {"disk_path": str(directory / "disk"), "disk_capacity": kind.disk_capacity}
        self.one = start(kind, root, None if ALONE else options | disk)
        self._worker = SimpleNamespace(_collect=None) if ALONE else worker()
        self._collect = self._worker._collect
        self._slow_until = math.inf
        self.live: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        self.rests: list[Rest] = []
        self._count_preemptions()
        self._events: dict[Callable[[], None], float] = {
            self.sends: 0.18,
            self.aborts_one: 0.03,
            self.aborts_one_that_loads: 0.01,
            self.aborts_all: 0.002,
            self.copies_slow_down: 0.02,
            self.copies_are_fast_again: 0.03,
            self.resets_the_device: 0.013,
            self.resets_the_connector: 0.0005,
            self.resets_running_requests: 0.0035,
            self.rests_for_a_moment: 0.003,
            self.steps: 0.708,
        }

    def _count_preemptions(self) -> None:
        preempt = self.one.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seen["preempted"] += 1
            return preempt(*args, **kwargs)

        self.one.scheduler._preempt_request = counted

    def runs(self, seconds: float) -> None:
        """Random events for a time, then until all has ended."""
        begin = told = time.monotonic()
        functions, weights = list(self._events), list(self._events.values())
        while (now := time.monotonic()) < begin + seconds or not self.is_enough():
            if now > told + PROGRESS_S:
                told = now
                print(f"{now - begin:.0f} s: {dict(self.seen)}, {resident_bytes() >> 20} MiB", flush=True)
            [event] = self._chance.choices(functions, weights)
            event()
        self.rests_for_a_moment()

    def is_enough(self) -> bool:
        """Whether a machine that is slow has got so far that the run says something."""
        return self.seen["compared"] >= 10 and self.seen["cached tokens"] > 0

    def sends(self) -> None:
        """A request arrives, or three copies of it at once."""
        if len(self.live) >= 40:
            return
        at = self._chance.randrange(len(self._items))
        item, _ = self._items[at]
        for _ in range(self._chance.choice([1, 1, 1, 1, 3])):
            name = f"r{self.seen['sent']}"
            priority = self._chance.randrange(self._kind.priorities)
            self.one.llm.llm_engine.add_request(name, item.prompt, item.params(), priority=priority)
            self.live[name] = at
            self.seen["sent"] += 1

    def aborts_one(self) -> None:
        """A client goes away."""
        if self.live:
            self._abort([self._chance.choice(list(self.live))])

    def _loading(self) -> list[str]:
        """The requests whose loads are under way. vLLM puts a number before a name, and adds letters."""
        if ALONE:
            return []
        running = self.one.connector._scheduler._loading
        names = {re.sub(r"^\d+_|-\w+$", "", request) for request in running}
        return [name for name in self.live if name in names]

    def aborts_one_that_loads(self) -> None:
        """A client goes away while the load of its request runs."""
        if loading := self._loading():
            self._abort([self._chance.choice(loading)])
            self.seen["aborted in a load"] += 1

    def aborts_all(self) -> None:
        """All clients go away at once."""
        self._abort(list(self.live))

    def _abort(self, names: list[str]) -> None:
        self.one.llm.llm_engine.abort_request(names)
        for name in names:
            del self.live[name]
        self.seen["aborted"] += len(names)

    def copies_slow_down(self) -> None:
        """The ends of copies are noticed later, as of a device that is busy."""
        self._worker._collect = lambda: None
        self._slow_until = time.monotonic() + SLOW_S

    def copies_are_fast_again(self) -> None:
        """The opposite."""
        self._worker._collect = self._collect
        self._slow_until = math.inf

    def resets_the_device(self) -> None:
        """vLLM empties its own cache, if no block is in use."""
        self.seen[f"reset of the device: {self.one.reset_device_cache()}"] += 1

    def resets_the_connector(self) -> None:
        """vLLM empties its cache and undercroft's."""
        self.seen[f"reset of undercroft: {self.one.reset_device_cache(connector=True)}"] += 1

    def resets_running_requests(self) -> None:
        """A trainer empties vLLM's cache while requests run, and loads of theirs are under way."""
        self.seen["overtaken loads"] += len(self._loading())
        assert self.one.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.seen["reset of running requests"] += 1

    def rests_for_a_moment(self) -> None:
        """No request is left, so nothing may be in use."""
        end = time.process_time() + STUCK_S
        self.copies_are_fast_again()
        while self.live:
            self.steps()
            there = self.one.scheduler.requests.values()
            assert time.process_time() < end, f"still there: {[describe(request) for request in there]}"
        if ALONE:
            assert self.one.device_blocks_in_use() == 0
        else:
            nothing_left(self.one, reset=False)
        gc.collect()
        self.rests.append(Rest(self.seen["sent"], resident_bytes(), len(list(Path("/proc/self/fd").iterdir()))))

    def steps(self) -> None:
        """One step of vLLM; the answers that end in it are compared."""
        engine = self.one.llm.llm_engine
        if time.monotonic() > self._slow_until:
            self.copies_are_fast_again()
        if not engine.has_unfinished_requests():
            self.one.core.step()
            return
        for output in engine.step():
            if output.finished and output.request_id in self.live:
                self._compare(output)

    def _compare(self, output: Any) -> None:
        at = self.live.pop(output.request_id)
        item, answer = self._items[at]
        self.seen["compared"] += 1
        self.seen["cached tokens"] += output.num_cached_tokens or 0
        difference = Answer.of(output).differs(answer, self._kind.rounding)
        assert not difference, f"{output.request_id}, {output.num_cached_tokens} tokens cached: {difference}; {item}"


def describe(request: Any) -> str:
    """Where a request is."""
    computed = f"{request.num_computed_tokens} of {request.num_tokens} tokens computed"
    return f"{request.request_id} {request.status.name}, {computed}, preempted {request.num_preemptions} times"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def quietest(rests: list[Rest], parts: int) -> list[Rest]:
    """The rest with the least memory of each part of the run."""
    size = len(rests) / parts
    cut = (rests[int(part * size) : int((part + 1) * size)] for part in range(parts))
    return [min(part, key=lambda rest: rest.resident) for part in cut if part]


def growth(rests: list[Rest]) -> float:
    """Bytes that each request has left behind in the later half of the run."""
    later = quietest([rest for rest in rests if rest.requests >= rests[-1].requests / 2], 2)
    begin, end = later[0], later[-1]
    return (end.resident - begin.resident) / max(1, end.requests - begin.requests)


@pytest.mark.parametrize("name", WANTED)
def test_every_answer_is_that_of_vllm_alone_and_nothing_is_left(name: str, model_root: Path, tmp_path: Path) -> None:
    print(f"\n{name}: to repeat, make soak-engine SOAK_KIND={name} SOAK_SEED={SEED} SOAK_SECONDS={SECONDS:.0f}")
    soak = Soak(KINDS[name], model_root, tmp_path, SEED)
    try:
        soak.runs(SECONDS)
        print(f"{name}, seed {SEED}, {SECONDS:.0f} s{', vLLM alone' * ALONE}: {dict(soak.seen)}")
        memory = [f"{rest.requests}: {rest.resident / (1 << 20):.1f}" for rest in quietest(soak.rests, 10)]
        print(f"requests: MiB, {'; '.join(memory)}; {growth(soak.rests):.0f} bytes a request; {soak.rests[-1]}")
        if not ALONE:
            nothing_failed(soak.one)
        if IS_LONG:
            assert soak.seen["preempted"]
            assert soak.rests[-1].descriptors <= soak.rests[1].descriptors, "descriptors are left open"
        if IS_LONG and not ALONE:
            assert stats(soak.one)["host_evictions"] and soak.seen["overtaken loads"]
            if soak.seen["sent"] >= FEW_REQUESTS:
                assert growth(soak.rests) <= LEAK_BYTES
    finally:
        soak.one.close()


def nothing_failed(one: Engine) -> None:
    """Neither a transfer nor a hook has failed."""
    found = stats(one)
    print({key: found[key] for key in ("host_evictions", "disk_evictions", "disk_reads", "saved_blocks")})
    assert {failure: found[failure] for failure in FAILURES} == dict.fromkeys(FAILURES, 0)
    assert not one.connector._counts.collect().get("counters", {}).get("hook_errors")
