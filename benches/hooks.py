"""Processor time of undercroft's hooks in vLLM's steps, on a small model on the CPU platform.

    python benches/hooks.py [--steps 100] [--json]

"decode N": the hooks of one step in which N requests decode, and each fills a block in every 32nd step. "decode N
timer": the part of it that is the timer's own. "device hit": the hooks of a request of `LONG_TOKENS` tokens that are
all on the device, from its arrival to its first token. Each figure is the median of `ROUNDS` rounds, in microseconds of
processor time of the thread that runs vLLM's steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from engines import OURS, Runner

from engine_checks import add
from real_engine import Engine, prompt, set_environment

BLOCK = 32
BATCHES = (1, 4, 16)
LONG_TOKENS = 120 * BLOCK
ROUNDS = 5


class Decoded(NamedTuple):
    """Seconds of the hooks of a number of steps in which no request ends or begins."""

    hooks: float
    timer: float
    """Of these, those of the timer."""


def decode(engine: Engine, batch: int, steps: int, seed: int) -> Decoded:
    """Let ``batch`` requests decode for a number of steps."""
    for index in range(batch):
        ids = prompt(2 * BLOCK + 1, seed=seed + index)
        add(engine, f"{seed}-{index}", ids, steps + 16)
    core = engine.llm.llm_engine
    while any(request.num_output_tokens == 0 for request in engine.scheduler.requests.values()):
        core.step()
    OURS.forget()
    for _ in range(steps):
        core.step()
    took = Decoded(OURS.seconds, OURS.timer_seconds())
    while core.has_unfinished_requests():
        core.step()
    engine.idle_steps()
    return took


def measure(steps: int) -> dict[str, float]:
    """Medians over the rounds, in microseconds."""
    set_environment()
    from tiny_models import make_llama

    with tempfile.TemporaryDirectory() as folder:
        model = make_llama(Path(folder) / "model")
        options = {"host_memory": "256MiB", "disk_path": f"{folder}/disk", "disk_capacity": "512MiB"}
        runner = Runner(model, options, blocks=1024, block_size=BLOCK, max_num_seqs=max(BATCHES))
        OURS.measure()
        taken: dict[str, list[float]] = {}
        seed = 0
        for _ in range(ROUNDS):
            for batch in BATCHES:
                with runner as engine:
                    took = decode(engine, batch, steps, seed)
                taken.setdefault(f"decode_{batch}_us", []).append(took.hooks / steps * 1e6)
                taken.setdefault(f"decode_{batch}_timer_us", []).append(took.timer / steps * 1e6)
                seed += batch
        ids = prompt(LONG_TOKENS + 1, seed=seed)
        runner.first_token(ids)
        hits = [runner.first_token(ids).ours_seconds * 1e6 for _ in range(ROUNDS)]
        taken["device_hit_us"] = hits
        runner.close()
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps of a round (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    found = measure(args.steps)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name.removesuffix('_us').replace('_', ' ')}: {value:.1f} us")


if __name__ == "__main__":
    main()
