"""The cost of the tiers' KV events in a step.

    python benches/event_cost.py [--rounds 40] [--json]

Two real vLLM engines on the CPU platform do the same work in turn. Both publish vLLM's own events, and one those of the
tiers, too. The work: prompts of 16 blocks that are new, so that blocks come to host memory and leave it, and 16 tokens
of answer. "added" is the difference of the medians of a step; "ours" is the time inside undercroft's calls for events,
as a part of the step. "noise": the comparison between two halves of the rounds without the tiers' events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import Runner

from engine_checks import BLOCK
from real_engine import prompt, set_environment
from undercroft.connector.observe.events import NO_EVENTS

PROMPTS = 4
BLOCKS = 16
ANSWER = 16


class Side:
    """One engine."""

    def __init__(self, model: Path, socket: str, tiers: bool) -> None:
        """``socket``: where its events are published; ``tiers``: those of the tiers, too."""
        from vllm.config import KVEventsConfig

        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=socket)
        self.runner = Runner(model, {"host_memory": "96MiB"}, blocks=128, kv_events_config=config)
        if not tiers:
            self.runner.engine.connector._events = NO_EVENTS
        self.ours = 0.0
        self.told = 0
        events = self.runner.engine.connector._events
        for name in ("arrived", "finished", "take") if tiers else ():
            setattr(events, name, self._timed(getattr(events, name)))
        self.round = 0

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self.ours += time.perf_counter() - start
            self.told += len(result or ())
            return result

        return timed

    def work(self) -> tuple[float, float]:
        """Seconds of a step in the next round, and those in calls for events."""
        self.round += 1
        prompts = [prompt(BLOCKS * BLOCK + 1, seed=self.round * PROMPTS + at) for at in range(PROMPTS)]
        with self.runner as engine:
            steps, ours = engine.steps, self.ours
            start = time.perf_counter()
            engine.generate_all(prompts, ANSWER)
            engine.idle_steps()
            seconds = time.perf_counter() - start
            steps = engine.steps - steps
            return seconds / steps, (self.ours - ours) / steps


def measure(rounds: int) -> dict[str, Any]:
    """Medians over the rounds, in microseconds."""
    set_environment()
    from tiny_models import make_llama

    with tempfile.TemporaryDirectory() as folder:
        model = make_llama(Path(folder) / "model")
        sides = {name: Side(model, f"ipc://{folder}/{name}", name == "on") for name in ("on", "off")}
        taken: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
        for turn in range(-4, rounds):
            for name in sorted(sides, reverse=bool(turn % 2)):
                found = sides[name].work()
                if turn >= 0:
                    taken[name].append(found)
        told = sides["on"].told
        for side in sides.values():
            side.runner.close()
    steps = {name: [seconds * 1e6 for seconds, _ in found] for name, found in taken.items()}
    on, off = (statistics.median(steps[name]) for name in ("on", "off"))
    ours = statistics.median(seconds * 1e6 for _, seconds in taken["on"])
    return {
        "step_off_us": off,
        "step_on_us": on,
        "added": (on - off) / off,
        "noise": abs(statistics.median(steps["off"][::2]) - statistics.median(steps["off"][1::2])) / off,
        "ours_us": ours,
        "ours": ours / on,
        "events": told,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.rounds)
    if args.json:
        print(json.dumps(found))
        return
    print(f"step without the tiers' events {found['step_off_us']:.0f} us, with events {found['step_on_us']:.0f} us")
    print(f"added {found['added']:.2%} (noise {found['noise']:.2%}), {found['events']} events in all")
    print(f"undercroft's calls for events: {found['ours_us']:.1f} us a step, {found['ours']:.2%}")


if __name__ == "__main__":
    main()
