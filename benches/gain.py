"""Time to the first token by where the prompt's KV cache is: computed, in host memory, on disk after a restart.

    python benches/gain.py [--rounds 30] [--json]

Real vLLM engines on the CPU platform take turns with the same prompts, one request at a time: one computes them, one
loads them from undercroft's host memory. Then the engine with undercroft is stopped, and another one starts on its
directory and loads other prompts, each for the first time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import Runner

from engine_checks import flush, stats
from real_engine import prompt, set_environment

TOKENS = (256, 512, 1024, 2048)
WARM_UP = 3
SETTINGS: dict[str, Any] = {"block_size": 32, "blocks": 160}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_environment()
    from tiny_models import make_llama

    with tempfile.TemporaryDirectory() as root:
        model = make_llama(Path(root) / "llama")
        disk = {"disk_path": str(Path(root) / "cache"), "disk_capacity": "4GiB"}
        results = measure(model, {"host_memory": "2GiB", **disk}, arguments.rounds)
    if arguments.json:
        print(json.dumps(results))
        return
    names = list(results[TOKENS[0]])
    print(f"| tokens | {', '.join(names)} ms (p50) |\n| --- | --- |")
    for tokens, taken in results.items():
        print(f"| {tokens} | {', '.join(f'{taken[name]:.2f}' for name in names)} |")


def measure(model: Path, options: dict[str, Any], rounds: int) -> dict[int, dict[str, float]]:
    """Median milliseconds by number of tokens and engine."""
    runners = {"computed": Runner(model, **SETTINGS), "host memory": Runner(model, options, **SETTINGS)}
    try:
        results = {tokens: in_turn(runners, lambda _, n=tokens: ids_of(n, -1), rounds) for tokens in TOKENS}
        for tokens in TOKENS:
            for turn in range(-WARM_UP, rounds):
                runners["host memory"].first_token(ids_of(tokens, turn + WARM_UP), forget=True)
        with runners["host memory"] as engine:
            flush(engine)
        runners.pop("host memory").close()
        runners["disk"] = Runner(model, options, **SETTINGS)
        for tokens, taken in results.items():
            found = in_turn(runners, lambda turn, n=tokens: ids_of(n, turn + WARM_UP), rounds)
            taken["disk, after a restart"] = found["disk"]
        with runners["disk"] as engine:
            asked, from_disk = (rounds + WARM_UP) * len(TOKENS), stats(engine)["promotions"]
            if from_disk < asked:
                raise RuntimeError(f"{from_disk} of {asked} prompts were on disk after the restart")
    finally:
        for runner in runners.values():
            runner.close()
    return results


def ids_of(tokens: int, number: int) -> list[int]:
    """A prompt whose last token is computed in any case, unlike the others of every length."""
    return prompt(tokens + 1, seed=1 + TOKENS.index(tokens) * 200 + number)


def in_turn(runners: dict[str, Runner], ids: Callable[[int], list[int]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each engine, asked in turn."""
    taken: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(-WARM_UP, rounds):
        for name in sorted(runners, reverse=bool(turn % 2)):
            found = runners[name].first_token(ids(turn), forget=True)
            if turn >= 0:
                taken[name].append(found.seconds * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


if __name__ == "__main__":
    main()
