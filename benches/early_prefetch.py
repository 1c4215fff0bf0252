"""Time to first token of prompts that lie on disk, behind a backlog: `early_prefetch` off and on.

    python benches/early_prefetch.py [--long] [--rounds 12] [--disk-mb-s 40] [--json]

Two real vLLM engines on the CPU platform take turns. In a round all requests arrive at once: first the backlog, whose
prompts are not cached and which fills the token budget of many steps, then prompts whose prefixes lie on disk only,
with more of the backlog's kind between them. `--long`: prompts of 32,769 tokens in place of 1,025, and none of the
backlog's kind between those on disk, so that the device has nothing to do while it waits for the disk.

"slowest pair": of all requests by their place in the queue, the most that one is later with it on (median over the
rounds); "noise": the same between two halves of the rounds with it off.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import Runner, with_faults

from engine_checks import add, flush, stats
from real_engine import set_environment


@dataclass(frozen=True, slots=True)
class Form:
    """What arrives, and the engine that it arrives at."""

    tokens: int
    budget: int
    sets: int
    """Sets of prompts on disk, used in turn: when a set is used again, the others have evicted it from host memory."""
    queue: list[bool]
    """By place: whether the prompt is on disk."""
    blocks: int
    host_memory: str
    payload_bytes: int
    """Of a token."""
    shape: dict[str, int]

    @property
    def on_disk(self) -> int:
        """Prompts of a set."""
        return sum(self.queue)

    def prompt(self, seed: int) -> list[int]:
        """A prompt that shares no prefix with others."""
        return random.Random(seed).choices(range(3, 990), k=self.tokens)


SHORT = Form(
    tokens=1025,
    budget=512,
    sets=4,
    queue=[False] * 4 + ([True] * 3 + [False]) * 4,
    blocks=400,
    host_memory="128MiB",
    payload_bytes=4 << 10,
    shape={},
)
LONG = Form(
    tokens=32769,
    budget=4096,
    sets=3,
    queue=[False] * 2 + [True] * 4,
    blocks=1800,
    host_memory="144MiB",
    payload_bytes=512,
    shape={
        "hidden": 64,
        "intermediate": 64,
        "layers": 2,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 32,
        "max_positions": 33024,
    },
)


class Side:
    """One engine, its disk filled with the sets."""

    def __init__(self, form: Form, model: Path, disk: Path, early_prefetch: bool) -> None:
        self.form = form
        options = {
            "host_memory": form.host_memory,
            "disk_path": str(disk),
            "disk_capacity": "2GiB",
            "early_prefetch": early_prefetch,
            "promotion_wait": "planned",
            "min_load_tokens": None,
        }
        settings = {"max_model_len": form.tokens + 255, "max_num_batched_tokens": form.budget, "max_num_seqs": 32}
        self.runner = Runner(model, options, blocks=form.blocks, **settings)
        self.new = itertools.count(1000)
        self.round = 0
        self.computed = 0.0
        """Prompts on disk that were not loaded, or the part of one: a disk that stands still for a second is not waited
        for."""
        self.cached: list[list[int]] = []
        """Tokens of each request that were not computed, by round and place."""
        self.read_bytes = 0.0
        for ids in itertools.chain.from_iterable(self.on_disk(index) for index in range(form.sets)):
            self.runner.first_token(ids, forget=True)

    def on_disk(self, index: int) -> list[list[int]]:
        """The prompts of one set."""
        return [self.form.prompt(index * self.form.on_disk + i) for i in range(self.form.on_disk)]

    def measure(self) -> list[float]:
        """Milliseconds to the first token of each request, by its place in the queue."""
        queue = self.form.queue
        known = iter(self.on_disk(self.round % self.form.sets))
        self.round += 1
        prompts = [next(known) if on_disk else self.form.prompt(next(self.new)) for on_disk in queue]
        with self.runner as engine:
            flush(engine)
            read_bytes = stats(engine)["disk_read_bytes"]
            start = time.perf_counter()
            for place, ids in enumerate(prompts):
                add(engine, f"{self.round}-{place}", ids, 1)
            taken: dict[int, float] = {}
            cached: dict[int, int] = {}
            while len(taken) < len(queue):
                for output in engine.llm.llm_engine.step():
                    place = int(output.request_id.split("-")[1])
                    taken[place] = (time.perf_counter() - start) * 1e3
                    cached[place] = output.num_cached_tokens or 0
                    self.computed += queue[place] * (1 - cached[place] / (self.form.tokens - 1))
            engine.idle_steps()
            self.read_bytes += stats(engine)["disk_read_bytes"] - read_bytes
            if not engine.reset_device_cache():
                raise RuntimeError("the device's cache is in use")
        self.cached.append([cached[place] for place in range(len(queue))])
        return [taken[place] for place in range(len(queue))]

    def read_share(self) -> float:
        """Bytes read from the disk, of those of the prompts that were on disk, in all rounds."""
        expected = self.round * self.form.on_disk * (self.form.tokens - 1) * self.form.payload_bytes
        return self.read_bytes / expected


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="prompts of 32,769 tokens")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--disk-mb-s", type=float)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_environment()
    from tiny_models import Shape, make_llama

    with_faults()
    form = LONG if arguments.long else SHORT

    with tempfile.TemporaryDirectory() as root:
        model = make_llama(Path(root) / "llama", Shape(**form.shape))
        sides = {name: Side(form, model, Path(root) / name, name == "on") for name in ("off", "on")}
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
    result = summary(rounds, form.queue) | {
        "computed": [sides[name].computed for name in ("off", "on")],
        "read_share": [sides[name].read_share() for name in ("off", "on")],
    }
    if arguments.json:
        print(json.dumps(result | {"rounds": rounds, "cached": {name: side.cached for name, side in sides.items()}}))
        return
    print("| requests | mean ms off, on | p99 ms off, on |")
    print("| --- | --- | --- |")
    for name in ("on disk", "backlog", "all"):
        (mean_off, mean_on), (p99_off, p99_on) = result[name]["mean"], result[name]["p99"]
        print(f"| {name} | {mean_off:.0f}, {mean_on:.0f} | {p99_off:.0f}, {p99_on:.0f} |")
    print(f"\nslowest pair {result['slowest_pair_ms']:+.0f} ms, noise {result['noise_ms']:.0f} ms")
    print("prompts on disk that were computed: off {:.1f}, on {:.1f}".format(*result["computed"]))
    print("of their KV cache, read from the disk: off {:.0%}, on {:.0%}".format(*result["read_share"]))
    print("by place:", ", ".join(f"{ms:+.0f}" for ms in result["by_place_ms"]))


def summary(rounds: dict[str, list[list[float]]], queue: list[bool]) -> dict[str, Any]:
    """Means and p99 of (off, on) by kind of request, and the differences by place."""
    kinds = {"on disk": [True], "backlog": [False], "all": [True, False]}
    result: dict[str, Any] = {}
    for name, wanted in kinds.items():
        values = {
            side: [ms for taken in rounds[side] for ms, on_disk in zip(taken, queue, strict=True) if on_disk in wanted]
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
