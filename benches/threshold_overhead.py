"""The cost of the hit threshold's hooks when no request has a threshold.

    python benches/threshold_overhead.py [--json]

First each hook by itself, in nanoseconds. Then whole engine steps on a small model, with the hooks and without them in
turn; "noise" is the same comparison between two halves of the steps without them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm"))

from real_engine import prompt, set_environment
from undercroft import vllm_patches
from undercroft.threshold.policy import HitThreshold

REQUESTS = 16
TOKENS = 48
ROUNDS = 24


def best_ns(action: Callable[[], object], number: int = 20_000) -> float:
    """Least time of one call, in nanoseconds."""
    return min(timeit.repeat(action, number=number, repeat=7)) / number * 1e9


def hook_costs() -> dict[str, float]:
    """Nanoseconds that each hook adds."""
    from vllm.v1.engine import EngineCoreOutput

    from undercroft.vllm_patches import frontend, rejections

    policy = HitThreshold(0.0)
    request = SimpleNamespace(
        request_id="r", num_tokens=4096, sampling_params=SimpleNamespace(extra_args=None), kv_transfer_params=None
    )

    def update_from_output(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        return {}

    def process_outputs(processor: Any, outputs: Any, timestamp: Any = None, stats: Any = None) -> None:
        return None

    class Scheduler:
        connector = SimpleNamespace(take_threshold_rejects=policy.collect)

    scheduler = Scheduler()
    update = rejections.wrap_update_from_output(update_from_output, None, None, None)
    process = frontend.wrap_process_outputs(process_outputs, object)
    outputs = [EngineCoreOutput(request_id=str(i), new_token_ids=[i]) for i in range(256)]
    return {
        "check, per question of the scheduler": best_ns(lambda: policy.check(request, 0, 0)),
        "update_from_output, per step": best_ns(lambda: update(scheduler, None, None))
        - best_ns(lambda: update_from_output(scheduler, None, None)),
        "process_outputs, per step of 256 requests": best_ns(lambda: process(None, outputs), 2_000)
        - best_ns(lambda: process_outputs(None, outputs), 2_000),
    }


def engine_steps() -> dict[str, float]:
    """Median time of a decode step with and without the hooks, in microseconds."""
    from threshold_engine import make
    from tiny_models import make_llama

    switch = hooks_switch()
    with tempfile.TemporaryDirectory() as directory:
        one = make(make_llama(Path(directory)), blocks=256)
        try:
            times: dict[bool, list[list[float]]] = {True: [], False: []}
            run_steps(one)  # warm
            for i in range(2 * ROUNDS):
                hooked = i % 2 == 0
                switch(hooked)
                times[hooked].append(run_steps(one))
            switch(True)
        finally:
            one.close()

    def median(rounds: list[list[float]]) -> float:
        return statistics.median(step for steps in rounds for step in steps) * 1e6

    without, with_hooks = median(times[False]), median(times[True])
    return {
        "without hooks": without,
        "with hooks": with_hooks,
        "difference": with_hooks - without,
        "noise": abs(median(times[False][0::2]) - median(times[False][1::2])),
    }


def hooks_switch() -> Callable[[bool], None]:
    """A function that puts the hooks of a step into vLLM's classes, or takes them out."""
    vllm_patches.reject_requests()
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor

    places = [(Scheduler, "update_from_output"), (OutputProcessor, "process_outputs")]
    hooked = {place: getattr(*place) for place in places}

    def switch(on: bool) -> None:
        for (owner, name), function in hooked.items():
            setattr(owner, name, function if on else function.__wrapped__)

    return switch


def run_steps(one: Any) -> list[float]:
    """Times of the decode steps of one batch, in seconds."""
    from vllm import SamplingParams

    assert one.reset_device_cache()
    engine = one.llm.llm_engine
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    for i in range(REQUESTS):
        engine.add_request(str(i), {"prompt_token_ids": prompt(64, seed=i)}, sampling)
    times = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the hit threshold's hooks when nobody uses them")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    arguments = parser.parse_args()
    set_environment()
    hooks, steps = hook_costs(), engine_steps()
    if arguments.json:
        print(json.dumps({"hooks_ns": hooks, "step_us": steps}))
        return
    for title, unit, rows in (("hook", "ns", hooks), (f"step of {REQUESTS} requests", "us", steps)):
        print(f"{title:<46}{unit:>10}")
        for name, value in rows.items():
            print(f"  {name:<44}{value:>10.1f}")


if __name__ == "__main__":
    main()
