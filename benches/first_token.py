"""What the connector adds to a request's time to first token, and to its engine steps.

    python benches/first_token.py [--rounds 100] [--tokens 1024] [--json]

Two real vLLM engines on the CPU platform, one with undercroft and one without, take turns with the same prompt: one
that the device's own prefix cache holds, one that nobody holds, and one that host memory holds (and the engine without
undercroft computes). "noise" is the difference between two halves of the rounds without undercroft.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import FirstToken, Runner

from harness import prompt, set_environment

Ask = Callable[[Runner, int], FirstToken]


def compare(runners: dict[str, Runner], ask: Ask, rounds: int) -> dict[str, Any]:
    """Medians of both engines over ``rounds`` requests each, in turn."""
    taken: dict[str, list[FirstToken]] = {name: [] for name in runners}
    for turn in range(-3, rounds):
        for name in sorted(runners, reverse=bool(turn % 2)):
            result = ask(runners[name], turn)
            if turn >= 0:
                taken[name].append(result)
    seconds = {name: [result.seconds * 1e3 for result in results] for name, results in taken.items()}
    on, off = statistics.median(seconds["on"]), statistics.median(seconds["off"])
    return {
        "on_ms": on,
        "off_ms": off,
        "added_ms": on - off,
        "noise_ms": abs(statistics.median(seconds["off"][::2]) - statistics.median(seconds["off"][1::2])),
        "on_steps": max(result.steps for result in taken["on"]),
        "off_steps": max(result.steps for result in taken["off"]),
        "on_steps_before": max(result.steps_before for result in taken["on"]),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_environment()
    from models import make_llama

    known = prompt(arguments.tokens + 1)
    cases: dict[str, Ask] = {
        "on the device": lambda one, turn: one.first_token(known),
        "nowhere": lambda one, turn: one.first_token(prompt(arguments.tokens + 1, seed=turn + 10), forget=True),
        "in host memory": lambda one, turn: one.first_token(known, forget=True),
    }
    with tempfile.TemporaryDirectory() as root:
        model = make_llama(Path(root) / "llama")
        disk = {"disk_path": str(Path(root) / "cache"), "disk_capacity": "1GiB"}
        runners = {
            "on": Runner(model, {"host_memory": "512MiB", **disk}, blocks=256),
            "off": Runner(model, blocks=256),
        }
        try:
            results = [{"prompt": name} | compare(runners, ask, arguments.rounds) for name, ask in cases.items()]
        finally:
            for runner in runners.values():
                runner.close()
    if arguments.json:
        print(json.dumps(results))
        return
    print("| prompt | with, without ms (p50) | added ms (noise) | steps with, without | steps before it begins |")
    print("| --- | --- | --- | --- | --- |")
    for r in results:
        times = f"{r['on_ms']:.2f}, {r['off_ms']:.2f} | {r['added_ms']:+.2f} ({r['noise_ms']:.2f})"
        print(f"| {r['prompt']} | {times} | {r['on_steps']}, {r['off_steps']} | {r['on_steps_before']} |")


if __name__ == "__main__":
    main()
