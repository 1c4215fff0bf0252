"""Bursts: many requests at once, whose prefixes lie in host memory; beside a vLLM without undercroft, cold.

    python benches/burst.py [--rounds 3] [--json]

Real vLLM engines on the CPU platform. The engine without undercroft computes the prompts, the one with it has them in
host memory and an empty device cache; each round takes both in turn. "blocks": the most device blocks in use. "loaded":
tokens loaded onto the device. "empty": steps that computed nothing, among "steps".
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import Runner

from real_engine import prompt, set_environment

SHARED = 2048
TOKENS = 80
BLOCKS = 96
"""Device blocks: too few for a copy of the prefix for each request."""


@dataclass
class Burst:
    """Time, steps and blocks of a burst."""

    seconds: float
    steps: int
    empty: int
    blocks: int
    loaded: int


def bursts() -> dict[str, list[list[int]]]:
    """The prompts of each kind of burst."""
    shared, other = prompt(SHARED), prompt(SHARED // 2, 7)
    return {
        "2, one prefix": [shared + prompt(40, 100 + i) for i in range(2)],
        "8, one prefix": [shared + prompt(40, 100 + i) for i in range(8)],
        "32, one prefix": [shared + prompt(40, 100 + i) for i in range(32)],
        "64, one prefix": [shared + prompt(40, 100 + i) for i in range(64)],
        "32, one prefix and 400 own tokens": [shared + prompt(400, 100 + i) for i in range(32)],
        "32, two prefixes and 300 own tokens": [
            (other if i % 2 else shared[: SHARED // 2]) + prompt(300, 100 + i) for i in range(32)
        ],
        "16, 1100 own tokens": [prompt(1100, 100 + i) for i in range(16)],
    }


def run(runner: Runner, prompts: list[list[int]], warm: bool) -> Burst:
    """Ask for the prompts at once; ``warm``: after they were saved and the device's cache was emptied."""
    with runner as engine:
        if warm:
            for ids in prompts:
                engine.generate(ids, 1)
            engine.idle_steps()
        if not engine.reset_device_cache():
            raise RuntimeError("the device's cache is in use")
        pool, schedule = engine.scheduler.kv_cache_manager.block_pool, engine.scheduler.schedule
        found = Burst(0.0, 0, 0, 0, 0)

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            found.steps += 1
            found.empty += not output.total_num_scheduled_tokens
            found.blocks = max(found.blocks, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
            return output

        engine.scheduler.schedule = counted
        connector = engine.connector
        if connector is not None:
            begin = connector.update_state_after_alloc

            def begun(request: Any, blocks: Any, num_external_tokens: int) -> None:
                found.loaded += num_external_tokens
                begin(request, blocks, num_external_tokens)

            connector.update_state_after_alloc = begun
        start = time.perf_counter()
        engine.generate_all(prompts, TOKENS)
        found.seconds = time.perf_counter() - start
        engine.scheduler.schedule = schedule
        if connector is not None:
            connector.update_state_after_alloc = begin
        engine.idle_steps()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each kind with each engine (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    set_environment()
    from tiny_models import make_llama

    with tempfile.TemporaryDirectory() as directory:
        model = make_llama(Path(directory) / "llama")
        settings: dict[str, Any] = {"blocks": BLOCKS, "max_num_seqs": 32}
        cold = Runner(model, None, **settings)
        warm = Runner(model, {"host_memory": "512MiB"}, **settings)
        results = {}
        for kind, prompts in bursts().items():
            taken: dict[str, list[Burst]] = {"cold": [], "warm": []}
            for _ in range(arguments.rounds):
                taken["cold"].append(run(cold, prompts, warm=False))
                taken["warm"].append(run(warm, prompts, warm=True))
            results[kind] = {
                name: asdict(
                    Burst(
                        statistics.median(burst.seconds for burst in found),
                        *(
                            max(getattr(burst, field) for burst in found)
                            for field in ("steps", "empty", "blocks", "loaded")
                        ),
                    )
                )
                for name, found in taken.items()
            }
            if not arguments.json:
                for name, burst in results[kind].items():
                    print(
                        f"{kind:<38} {name}: {burst['seconds']:6.2f} s, {burst['steps']:4} steps "
                        f"({burst['empty']} empty), {burst['blocks']:3} blocks, {burst['loaded']:6} tokens loaded",
                        flush=True,
                    )
        if arguments.json:
            print(json.dumps(results))
        cold.close()
        warm.close()


if __name__ == "__main__":
    main()
