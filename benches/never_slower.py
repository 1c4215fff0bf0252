"""Time to first token of prompts on a slow disk, beside computing: "never slower than without it".

    python benches/never_slower.py [--requests 8] [--tokens 256,512,1024,2048] [--rates 0.25,0.5,1,2] [--only idle]
                                   [--twin] [--cpu] [--cgroup] [--lies] [--json] [--log FILE]

Real vLLM engines on the CPU platform take turns with prompts that lie on disk only: one that plans ("planned"), one
that always loads (`promotion_wait` "complete", `min_load_tokens` 0), and one without undercroft, which always computes.
The reads of each end at a given rate, which the fault injector of the IO engine keeps, or with `--cgroup` a block
cgroup (as root); rates are multiples of the one
at which loading takes as long as computing the prompt, measured before. "busy": four other requests decode meanwhile.
"planned/best": the means of "planned" and of the better of the two others; "worst": the slowest planned request beside
the mean of computing. `--twin`: a second engine without undercroft takes its turns, too; its times beside those of the
first are the noise ("twin/compute", and its p99). `--cpu`: processor time of vLLM's thread, which polls while it waits,
in place of the time that passes; for a machine with other work. `--lies`: the disk is fast, then hangs, then is slow,
and each request of the planning engine is listed. `--log`: a line of JSON for each request, with the planner's
decision, its prediction and its new values.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from block_cgroup import BlockCgroup
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
HOST_TOKENS = 8192
"""Tokens that host memory holds."""


def new_prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that shares no prefix with others, and whose last token no hit covers."""
    return random.Random(seed).choices(range(3, 990), k=tokens + 1)


def decided(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """The planner's decision for one request, the predicted and actual milliseconds, and the values it has learned."""
    new = {
        name: after[name] - before[name]
        for name in after
        if name.startswith(("plans_", "tokens_not", "promotions_given"))
    }
    times = {
        name: (after[name] - before[name]) * 1e3 for name in after if name.startswith(("plan_predicted", "plan_actual"))
    }
    learned = {
        name: after[name] for name in after if name.startswith("plan_") and name not in times and "_error_" not in name
    }
    return {name: value for name, value in (new | times | learned).items() if value}


class Side:
    """One engine and the prompts on its disk, which are asked for in turn: until one is asked for again, the others
    have driven it out of host memory."""

    def __init__(self, way: str, model: Path, disk: Path, lengths: list[int], least: int, cpu: bool = False) -> None:
        self.cpu = cpu
        self.way = way
        """"planned", "load", "compute" or "twin"."""
        self.cgroup: BlockCgroup | None = None
        options: dict[str, Any] | None = None
        if way in ("planned", "load"):
            options = {"host_memory": "32MiB", "disk_path": str(disk), "disk_capacity": "1GiB"}
            planned = way == "planned"
            options["promotion_wait"] = "planned" if planned else "complete"
            options["min_load_tokens"] = None if planned else 0
        self.runner = Runner(model, options, blocks=640, max_num_seqs=16)
        self.core: Any = None if options is None else self.runner.engine.connector._engine
        self.last: dict[str, float] = {}
        """The decision, the prediction and the learned values of the last request."""
        self.new = itertools.count(10**6 * (1 + (*WAYS, "twin").index(way)))
        self.stored = {}
        if self.core is not None:
            for tokens in lengths:
                seeds = [next(self.new) for _ in range(max(least, 3 * HOST_TOKENS // tokens))]
                self.stored[tokens] = itertools.cycle(seeds)
                for seed in seeds:
                    self.runner.first_token(new_prompt(seed, tokens), forget=True)
                    with self.runner as one:
                        flush(one)
            # Other prompts push the last ones out of host memory.
            for _ in range(8):
                self.runner.first_token(new_prompt(next(self.new), 2048), forget=True)
            with self.runner as one:
                flush(one)

    def limit(self, bytes_per_s: float | None) -> None:
        """Let the disk be read at this rate."""
        if self.cgroup is not None:
            self.cgroup.limit(bytes_per_s)
        elif self.core is not None and not self.core.limit_reads(bytes_per_s):
            raise RuntimeError("the engine's disk cannot be made slow")

    def ask(self, tokens: int, busy: bool) -> float:
        """Milliseconds to the first token of the next prompt of that length."""
        before = {} if self.core is None else self.core.stats()
        wall_ms, cpu_ms = (seconds * 1e3 for seconds in self._ask(tokens, busy))
        self.last = {} if self.core is None else decided(before, self.core.stats())
        self.last["cpu_ms"] = cpu_ms
        return cpu_ms if self.cpu else wall_ms

    def _ask(self, tokens: int, busy: bool) -> tuple[float, float]:
        """Seconds that pass, and those of processor time of vLLM's thread."""
        ids = new_prompt(next(self.new if self.core is None else self.stored[tokens]), tokens)
        if not busy:
            first = self.runner.first_token(ids, forget=True)
            return first.seconds, first.cpu_seconds
        return self._ask_busy(ids)

    def _ask_busy(self, ids: list[int]) -> tuple[float, float]:
        name = f"asked-{next(self.new)}"
        with self.runner as one:
            for i in range(DECODES):
                add(one, f"{name}-{i}", new_prompt(next(self.new), 32), 4000)
            step = one.llm.llm_engine.step
            for _ in range(6):
                step()
            start, cpu_start = time.perf_counter(), time.thread_time()
            add(one, name, ids, 1)
            while not any(output.request_id == name and output.finished for output in step()):
                pass
            seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu_start
            one.llm.llm_engine.abort_request([f"{name}-{i}" for i in range(DECODES)])
            one.idle_steps()
            one.reset_device_cache()
        return seconds, cpu_seconds


def measure(
    sides: list[Side], loads: list[bool], lengths: list[int], factors: list[float], requests: int, log: IO[str]
) -> list[dict[str, Any]]:
    """One row for each length, rate, and idle or busy."""
    stats = sides[0].core.stats()
    per_token = stats["plan_bytes_per_token"]
    rows = []
    for busy, tokens in itertools.product(loads, lengths):
        compute = next(side for side in sides if side.way == "compute")
        alone = statistics.median(compute.ask(tokens, busy) for _ in range(5))
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
                    log.write(json.dumps([tokens, busy, factor, turn, side.way, round(ms, 1), side.last]) + "\n")
            rows.append({"tokens": tokens, "busy": busy, "rate": factor, "even_mb_s": even / 1e6} | taken)
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    mean = {way: statistics.mean(row[way]) for way in (*WAYS, "twin") if way in row}
    best = min(mean["load"], mean["compute"])
    twin = f" {mean['twin'] / mean['compute']:.2f} |" if "twin" in mean else ""
    worst = max(row["planned"]) / mean["compute"]
    return (
        f"| {row['tokens']} | {'busy' if row['busy'] else 'idle'} | {row['rate']:g} x {row['even_mb_s']:.0f} MB/s | "
        f"{mean['load']:.0f}, {mean['compute']:.0f}, {mean['planned']:.0f} | {mean['planned'] / best:.2f} | "
        f"{mean['planned'] / mean['compute']:.2f} | {worst:.2f} |{twin}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """The figures of all rows that the goals are about."""
    means = [{way: statistics.mean(row[way]) for way in (*WAYS, "twin") if way in row} for row in rows]
    best = [mean["planned"] / min(mean["load"], mean["compute"]) for mean in means]

    def most(way: str) -> float:
        return max(mean[way] / mean["compute"] for mean in means)

    def p99(way: str) -> float:
        each = sorted(ms / mean["compute"] for row, mean in zip(rows, means, strict=True) for ms in row[way])
        return each[int(0.99 * (len(each) - 1))]

    twin = f"; twin/compute: most {most('twin'):.2f}, p99 {p99('twin'):.2f}" if "twin" in means[0] else ""
    return (
        f"planned/best: mean {statistics.mean(best):.3f}, most {max(best):.2f}; "
        f"planned/compute: most {most('planned'):.2f}; "
        f"p99 of single requests {p99('planned'):.2f}, of computing itself {p99('compute'):.2f}{twin}"
    )


def lie(planned: Side, compute: Side, tokens: int, requests: int, log: IO[str]) -> None:
    """A disk that is fast, hangs, and is slow."""
    alone = statistics.mean(compute.ask(tokens, False) for _ in range(8))
    even = planned.core.stats()["plan_bytes_per_token"] * tokens / (alone / 1e3)
    for name, rate in (("fast", FAST), ("hung", 0.0), ("slow", even / 4), ("fast again", FAST)):
        planned.limit(rate)
        taken = []
        for turn in range(requests):
            taken.append(planned.ask(tokens, False))
            log.write(json.dumps([tokens, False, name, turn, "planned", round(taken[-1], 1), planned.last]) + "\n")
        now = statistics.mean(compute.ask(tokens, False) for _ in range(5))
        ratios = ", ".join(f"{ms / now:.2f}" for ms in taken)
        print(f"| {name} | {now:.0f} | {ratios} |", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", default="256,512,1024,2048")
    parser.add_argument("--rates", default="0.25,0.5,0.7,1,1.4,2,4,8")
    parser.add_argument("--only", choices=("idle", "busy"))
    parser.add_argument("--twin", action="store_true", help="measure the noise with a second engine that computes")
    parser.add_argument("--cpu", action="store_true", help="measure processor time")
    parser.add_argument("--cgroup", action="store_true", help="a block cgroup limits the reads")
    parser.add_argument("--lies", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--log", help="a file for a line about each request")
    arguments = parser.parse_args()
    set_environment()
    from tiny_models import make_llama

    with_faults()
    lengths = [int(tokens) for tokens in arguments.tokens.split(",")]
    factors = [float(rate) for rate in arguments.rates.split(",")]
    loads = [load == "busy" for load in ("idle", "busy") if arguments.only in (None, load)]
    with tempfile.TemporaryDirectory() as root, Path(arguments.log or os.devnull).open("w") as log:
        model = make_llama(Path(root) / "llama")
        least = 4 * arguments.requests if arguments.lies else 0
        ways = ("planned", "compute") if arguments.lies else (*WAYS, "twin") if arguments.twin else WAYS
        sides = [Side(way, model, Path(root) / way, lengths, least, arguments.cpu) for way in ways]
        cgroup = BlockCgroup(Path(root)) if arguments.cgroup else None
        for side in sides:
            side.cgroup = cgroup
        # As vLLM does after the start of an engine: else a collection looks at all objects of three engines.
        gc.collect()
        gc.freeze()
        try:
            if arguments.lies:
                print("| disk | computing, ms | each request, times computing |\n| --- | --- | --- |")
                lie(sides[0], sides[1], lengths[-1], arguments.requests, log)
                return
            sides[0].limit(FAST)
            for turn in range(LEARN):
                sides[0].ask(lengths[turn % len(lengths)], False)
            twin = " twin/compute |" if arguments.twin else ""
            print("| tokens | | disk | load, compute, planned ms | planned/best | planned/compute | worst |" + twin)
            print("| --- | --- | --- | --- | --- | --- | --- |" + (" --- |" if twin else ""))
            rows = measure(sides, loads, lengths, factors, arguments.requests, log)
            print(summary(rows))
            if arguments.json:
                print(json.dumps(rows))
            stats = sides[0].core.stats()
            print({name: value for name, value in stats.items() if name.startswith("plan") and value})
        finally:
            for side in sides:
                side.runner.close()
            if cgroup is not None:
                cgroup.close()


if __name__ == "__main__":
    main()
