"""Time to first token of prompts on a slow disk, beside computing: "never slower than without it".

    python benches/never_slower.py [--requests 8] [--tokens 512,1024,2048] [--rates 0.25,0.5,1,2,4] [--lies] [--json]

Real vLLM engines on the CPU platform take turns with prompts that lie on disk only: one that plans ("planned"), one
that always loads (`promotion_wait` "complete", `min_load_tokens` 0), and one without undercroft, which always computes.
The reads of each end at a given rate, which the fault injector of the IO engine keeps; rates are multiples of the one
at which loading takes as long as computing the prompt, measured before. "busy": four other requests decode meanwhile.
`--lies`: the disk is fast, then hangs, then is slow, and each request of the planning engine is listed.
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

WAYS = ("planned", "load", "compute")
LEARN = 12
"""Requests of the planning engine, on a fast disk, before anything is measured."""
SETTLE = 2
"""Requests after each change of the rate that are not measured: `--lies` shows those."""
DECODES = 4
FAST = 1e9


def new_prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that shares no prefix with others, and whose last token no hit covers."""
    return random.Random(seed).choices(range(3, 990), k=tokens + 1)


class Side:
    """One engine and the prompts on its disk, each of which is asked for once."""

    def __init__(self, way: str, model: Path, disk: Path, lengths: list[int], each: int) -> None:
        self.way = way
        options: dict[str, Any] | None = None
        if way != "compute":
            options = {"host_memory": "32MiB", "disk_path": str(disk), "disk_capacity": "3GiB"}
            planned = way == "planned"
            options["promotion_wait"] = "planned" if planned else "complete"
            options["min_load_tokens"] = None if planned else 0
        self.runner = Runner(model, options, blocks=640, max_num_seqs=16)
        self.core: Any = None if options is None else self.runner.engine.connector._engine
        self.new = itertools.count(10**6 * (1 + WAYS.index(way)))
        self.stored = {tokens: [next(self.new) for _ in range(each)] for tokens in lengths}
        if self.core is not None:
            for tokens, seeds in self.stored.items():
                for seed in seeds:
                    self.runner.first_token(new_prompt(seed, tokens), forget=True)
                    with self.runner as one:
                        flush(one)
            # Other prompts push the last ones out of host memory.
            for _ in range(16):
                self.runner.first_token(new_prompt(next(self.new), 2048), forget=True)
            with self.runner as one:
                flush(one)

    def limit(self, bytes_per_s: float | None) -> None:
        """Let the disk be read at this rate."""
        if self.core is not None and not self.core.limit_reads(bytes_per_s):
            raise RuntimeError("the engine's disk cannot be made slow")

    def ask(self, tokens: int, busy: bool) -> float:
        """Milliseconds to the first token of the next prompt of that length."""
        stored = self.stored[tokens]
        ids = new_prompt(next(self.new) if self.core is None else stored.pop(), tokens)
        if not busy:
            return self.runner.first_token(ids, forget=True).seconds * 1e3
        return self._ask_busy(ids)

    def _ask_busy(self, ids: list[int]) -> float:
        name = f"asked-{next(self.new)}"
        with self.runner as one:
            for i in range(DECODES):
                add(one, f"{name}-{i}", new_prompt(next(self.new), 32), 4000)
            step = one.llm.llm_engine.step
            for _ in range(6):
                step()
            start = time.perf_counter()
            add(one, name, ids, 1)
            while not any(output.request_id == name and output.finished for output in step()):
                pass
            seconds = time.perf_counter() - start
            one.llm.llm_engine.abort_request([f"{name}-{i}" for i in range(DECODES)])
            one.idle_steps()
            one.reset_device_cache()
        return seconds * 1e3


def measure(sides: list[Side], lengths: list[int], factors: list[float], requests: int) -> list[dict[str, Any]]:
    """One row for each length, rate, and idle or busy."""
    stats = sides[0].core.stats()
    per_token = stats["plan_bytes_per_token"]
    rows = []
    for busy, tokens in itertools.product((False, True), lengths):
        alone = statistics.median(sides[-1].ask(tokens, busy) for _ in range(5))
        even = per_token * tokens / (alone / 1e3)
        for factor in factors:
            taken: dict[str, list[float]] = {side.way: [] for side in sides}
            for side in sides:
                side.limit(even * factor)
            for turn in range(-SETTLE, requests):
                for side in sides if turn % 2 else reversed(sides):
                    ms = side.ask(tokens, busy)
                    if turn >= 0:
                        taken[side.way].append(ms)
            rows.append({"tokens": tokens, "busy": busy, "rate": factor, "even_mb_s": even / 1e6} | taken)
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    mean = {way: statistics.mean(row[way]) for way in WAYS}
    best = min(mean["load"], mean["compute"])
    worst = max(row["planned"]) / mean["compute"]
    return (
        f"| {row['tokens']} | {'busy' if row['busy'] else 'idle'} | {row['rate']:g} x {row['even_mb_s']:.0f} MB/s | "
        f"{mean['load']:.0f}, {mean['compute']:.0f}, {mean['planned']:.0f} | {mean['planned'] / best:.2f} | "
        f"{mean['planned'] / mean['compute']:.2f} | {worst:.2f} |"
    )


def lie(planned: Side, compute: Side, tokens: int, requests: int) -> None:
    """A disk that is fast, hangs, and is slow."""
    alone = statistics.mean(compute.ask(tokens, False) for _ in range(8))
    even = planned.core.stats()["plan_bytes_per_token"] * tokens / (alone / 1e3)
    for name, rate in (("fast", FAST), ("hung", 0.0), ("slow", even / 4), ("fast again", FAST)):
        planned.limit(rate)
        taken = [planned.ask(tokens, False) for _ in range(requests)]
        now = statistics.mean(compute.ask(tokens, False) for _ in range(5))
        ratios = ", ".join(f"{ms / now:.2f}" for ms in taken)
        print(f"| {name} | {now:.0f} | {ratios} |", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", default="512,1024,2048")
    parser.add_argument("--rates", default="0.25,0.5,0.7,1,1.4,2,4,8")
    parser.add_argument("--lies", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_environment()
    from tiny_models import make_llama

    with_faults()
    lengths = [int(tokens) for tokens in arguments.tokens.split(",")]
    factors = [float(rate) for rate in arguments.rates.split(",")]
    each = 4 * arguments.requests if arguments.lies else 2 * len(factors) * (arguments.requests + SETTLE) + LEARN
    with tempfile.TemporaryDirectory() as root:
        model = make_llama(Path(root) / "llama")
        ways = ("planned", "compute") if arguments.lies else WAYS
        sides = [Side(way, model, Path(root) / way, lengths, each) for way in ways]
        try:
            if arguments.lies:
                print("| disk | computing, ms | each request, times computing |\n| --- | --- | --- |")
                lie(sides[0], sides[1], lengths[-1], arguments.requests)
                return
            sides[0].limit(FAST)
            for turn in range(LEARN):
                sides[0].ask(lengths[turn % len(lengths)], False)
            print("| tokens | | disk | load, compute, planned ms (mean) | planned/best | planned/compute | worst |")
            print("| --- | --- | --- | --- | --- | --- | --- |")
            rows = measure(sides, lengths, factors, arguments.requests)
            if arguments.json:
                print(json.dumps(rows))
            stats = sides[0].core.stats()
            print({name: value for name, value in stats.items() if name.startswith("plan") and value})
        finally:
            for side in sides:
                side.runner.close()


if __name__ == "__main__":
    main()
