"""Time to first token of prompts that lie on disk, behind a backlog: `early_prefetch` off and on.

    python benches/early_prefetch.py [--rounds 12] [--disk-mb-s 40] [--json]

Two real vLLM engines on the CPU platform take turns. In a round all requests arrive at once: first the backlog, whose
prompts are not cached and which fills the token budget of many steps, then prompts whose prefixes lie on disk only,
with more of the backlog's kind between them. "slowest pair": of all requests by their place in the queue, the most that
one is later with it on (median over the rounds); "noise": the same between two halves of the rounds with it off.
`--disk-mb-s`: the disk is read at this rate, as the fault injector keeps it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import Runner, with_faults

from engine_checks import add, flush
from real_engine import set_environment

TOKENS = 1025
BUDGET = 512
SETS = 4
"""Sets of prompts on disk, used in turn: when a set is used again, the others have evicted it from host memory."""
BACKLOG = 4
ON_DISK = 12
QUEUE = [False] * BACKLOG + ([True] * 3 + [False]) * (ON_DISK // 3)
"""By place: whether the prompt is on disk."""


def new_prompt(seed: int) -> list[int]:
    """A prompt that shares no prefix with others."""
    return random.Random(seed).choices(range(3, 990), k=TOKENS)


class Side:
    """One engine, its disk filled with the sets."""

    def __init__(self, model: Path, disk: Path, early_prefetch: bool) -> None:
        options = {
            "host_memory": "128MiB",
            "disk_path": str(disk),
            "disk_capacity": "2GiB",
            "early_prefetch": early_prefetch,
            "promotion_wait": "planned",
            "min_load_tokens": None,
        }
        self.runner = Runner(model, options, blocks=400, max_num_batched_tokens=BUDGET, max_num_seqs=32)
        self.new = itertools.count(1000)
        self.round = 0
        self.computed = 0
        """Prompts on disk that were not loaded: a disk that stands still for a second is not waited for."""
        for ids in itertools.chain.from_iterable(self.on_disk(index) for index in range(SETS)):
            self.runner.first_token(ids, forget=True)

    def on_disk(self, index: int) -> list[list[int]]:
        """The prompts of one set."""
        return [new_prompt(index * ON_DISK + i) for i in range(ON_DISK)]

    def measure(self) -> list[float]:
        """Milliseconds to the first token of each request, by its place in the queue."""
        known = iter(self.on_disk(self.round % SETS))
        self.round += 1
        prompts = [next(known) if on_disk else new_prompt(next(self.new)) for on_disk in QUEUE]
        with self.runner as engine:
            flush(engine)
            start = time.perf_counter()
            for place, ids in enumerate(prompts):
                add(engine, f"{self.round}-{place}", ids, 1)
            taken: dict[int, float] = {}
            while len(taken) < len(QUEUE):
                for output in engine.llm.llm_engine.step():
                    place = int(output.request_id.split("-")[1])
                    taken[place] = (time.perf_counter() - start) * 1e3
                    self.computed += QUEUE[place] and not output.num_cached_tokens
            engine.idle_steps()
            if not engine.reset_device_cache():
                raise RuntimeError("the device's cache is in use")
        return [taken[place] for place in range(len(QUEUE))]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--disk-mb-s", type=float)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_environment()
    from tiny_models import make_llama

    with_faults()

    with tempfile.TemporaryDirectory() as root:
        model = make_llama(Path(root) / "llama")
        sides = {name: Side(model, Path(root) / name, name == "on") for name in ("off", "on")}
        rounds: dict[str, list[list[float]]] = {name: [] for name in sides}
        try:
            if arguments.disk_mb_s:
                for side in sides.values():
                    side.runner.engine.connector._engine.limit_reads(arguments.disk_mb_s * 1e6)
            for turn in range(-1, arguments.rounds):
                for name in sorted(sides, reverse=bool(turn % 2)):
                    taken = sides[name].measure()
                    if turn >= 0:
                        rounds[name].append(taken)
        finally:
            for side in sides.values():
                side.runner.close()
    result = summary(rounds) | {"computed": [sides[name].computed for name in ("off", "on")]}
    if arguments.json:
        print(json.dumps(result))
        return
    print("| requests | mean ms off, on | p99 ms off, on |")
    print("| --- | --- | --- |")
    for name in ("on disk", "backlog", "all"):
        (mean_off, mean_on), (p99_off, p99_on) = result[name]["mean"], result[name]["p99"]
        print(f"| {name} | {mean_off:.0f}, {mean_on:.0f} | {p99_off:.0f}, {p99_on:.0f} |")
    print(f"\nslowest pair {result['slowest_pair_ms']:+.0f} ms, noise {result['noise_ms']:.0f} ms")
    print("prompts on disk that were computed: off {}, on {}".format(*result["computed"]))
    print("by place:", ", ".join(f"{ms:+.0f}" for ms in result["by_place_ms"]))


def summary(rounds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Means and p99 of (off, on) by kind of request, and the differences by place."""
    kinds = {"on disk": [True], "backlog": [False], "all": [True, False]}
    result: dict[str, Any] = {}
    for name, wanted in kinds.items():
        values = {
            side: [ms for taken in rounds[side] for ms, on_disk in zip(taken, QUEUE, strict=True) if on_disk in wanted]
            for side in ("off", "on")
        }
        result[name] = {
            "mean": [statistics.mean(values[side]) for side in ("off", "on")],
            "p99": [statistics.quantiles(values[side], n=100)[98] for side in ("off", "on")],
        }

    def by_place(taken: list[list[float]]) -> list[float]:
        return [statistics.median(values) for values in zip(*taken, strict=True)]

    differences = [b - a for a, b in zip(by_place(rounds["off"]), by_place(rounds["on"]), strict=True)]
    halves = zip(by_place(rounds["off"][::2]), by_place(rounds["off"][1::2]), strict=True)
    result |= {
        "by_place_ms": differences,
        "slowest_pair_ms": max(differences),
        "noise_ms": max(abs(a - b) for a, b in halves),
    }
    return result


if __name__ == "__main__":
    main()
