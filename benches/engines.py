"""Helpers of the benchmarks on real vLLM engines: several engines in one process, and one request's time to its first
token with the steps that it takes."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm"))

from engine_checks import add, begun
from real_engine import Engine


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request until its first token."""

    seconds: float
    steps: int
    """Engine steps up to the one that gave it."""
    steps_before: int
    """Engine steps before the one that computed the request's first tokens, or began to load them."""
    cpu_seconds: float = 0.0
    """Processor time of this thread, which is vLLM's: without the time that other processes had the core. vLLM polls
    while it waits, so that a wait counts."""
    ours_seconds: float = 0.0
    """Of these, those in the connector's hooks, if `OURS` measures."""


DOES_NOTHING = "handle_preemptions"
"""A hook without a body, which vLLM calls once in each step."""


class HookTime:
    """Processor time that this thread spends in the connector's hooks, of all engines."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_hook: defaultdict[str, float] = defaultdict(float)
        """Seconds of each hook."""
        self.calls: Counter[str] = Counter()
        self._is_inside = False

    def measure(self) -> None:
        """Measure from now on."""
        from undercroft.connector.connector import UndercroftConnector

        for name, hook in list(vars(UndercroftConnector).items()):
            if isinstance(hook, FunctionType) and not name.startswith("_"):
                setattr(UndercroftConnector, name, self._timed(hook))

    def timer_seconds(self) -> float:
        """Of `seconds`, those of the timer: the time of as many calls of a hook that does nothing, amid the others."""
        return self.by_hook[DOES_NOTHING] / max(1, self.calls[DOES_NOTHING]) * self.calls.total()

    def forget(self) -> None:
        """Begin anew."""
        self.seconds = 0.0
        self.by_hook.clear()
        self.calls.clear()

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        name = hook.__name__

        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return hook(*args, **kwargs)
            self._is_inside, start = True, time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                took = time.thread_time() - start
                self.seconds += took
                self.by_hook[name] += took
                self.calls[name] += 1
                self._is_inside = False

        return timed


OURS = HookTime()


class Runner:
    """One of several engines: vLLM keeps one worker's connector in a process, so it is put in place to run one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start it; arguments of `real_engine.Engine`."""
        _set_agent(None)
        self.engine = Engine(*args, **kwargs)
        self._agent = _set_agent(None)
        self._names = 0

    def __enter__(self) -> Engine:
        _set_agent(self._agent)
        return self.engine

    def __exit__(self, *_: object) -> None:
        _set_agent(None)

    def first_token(self, ids: Sequence[int], *, forget: bool = False) -> FirstToken:
        """Run a request of one token alone, then the work that it leaves; ``forget``: empty the device's cache."""
        self._names += 1
        with self as engine:
            before = engine.steps
            ours_start = OURS.seconds
            start, cpu_start = time.perf_counter(), time.thread_time()
            add(engine, str(self._names), ids, 1)
            steps_before = -1
            while not engine.llm.llm_engine.step():
                if steps_before < 0 and begun(engine):
                    steps_before = engine.steps - before - 1
            seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu_start
            ours_seconds = OURS.seconds - ours_start
            steps = engine.steps - before
            steps_before = steps - 1 if steps_before < 0 else steps_before
            engine.idle_steps()
            if forget and not engine.reset_device_cache():
                raise RuntimeError("the device's cache is in use")
            return FirstToken(seconds, steps, steps_before, cpu_seconds, ours_seconds)

    def close(self) -> None:
        """Stop the engine."""
        with self as engine:
            engine.close()


def with_faults() -> None:
    """Let the disks of the engines that follow be made slow (`_core.Engine.limit_reads`)."""
    from undercroft import engine

    options_of = engine.engine_options
    engine.engine_options = lambda *args, **kwargs: options_of(*args, **kwargs) | {"inject_faults": True}


Ask = Callable[[Runner, int], FirstToken]
"""One measurement with a runner, given the number of the round."""


def compare(runners: dict[str, Runner], ask: Ask, rounds: int) -> dict[str, Any]:
    """Medians of "on" and "off" over ``rounds`` requests each, in turn. "twin": another engine like "off"."""
    taken: dict[str, list[FirstToken]] = {name: [] for name in runners}
    for turn in range(-3, rounds):
        for name in sorted(runners, reverse=bool(turn % 2)):
            result = ask(runners[name], turn)
            if turn >= 0:
                taken[name].append(result)
    seconds = {name: [result.seconds * 1e3 for result in results] for name, results in taken.items()}
    on, off = statistics.median(seconds["on"]), statistics.median(seconds["off"])
    cpu = {name: statistics.median(result.cpu_seconds * 1e3 for result in taken[name]) for name in ("on", "off")}
    more = {"twin_ms": statistics.median(seconds["twin"]) - off} if "twin" in seconds else {}
    return more | {
        "on_ms": on,
        "off_ms": off,
        "added_ms": on - off,
        "on_cpu_ms": cpu["on"],
        "off_cpu_ms": cpu["off"],
        "ours_ms": statistics.median(result.ours_seconds * 1e3 for result in taken["on"]),
        "noise_ms": abs(statistics.median(seconds["off"][::2]) - statistics.median(seconds["off"][1::2])),
        "on_steps": max(result.steps for result in taken["on"]),
        "off_steps": max(result.steps for result in taken["off"]),
        "on_steps_before": max(result.steps_before for result in taken["on"]),
    }


def _set_agent(agent: Any) -> Any:
    from vllm.distributed.kv_transfer import kv_transfer_state

    before, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, agent
    return before
