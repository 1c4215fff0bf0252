"""From how many tokens on a load from host memory beats computing them: the best value of `min_load_tokens`.

    python benches/min_load.py [--rounds 60] [--json]

Two real vLLM engines on the CPU platform with blocks of 32 tokens take turns with the same prompts of 33 to 1,025
tokens, alone: one loads all but the last token from host memory, the other computes them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from engines import Runner, compare

from real_engine import prompt, set_environment

TOKENS = (32, 64, 96, 128, 192, 256, 512, 1024)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_environment()
    from tiny_models import make_llama

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        model = make_llama(Path(root) / "llama")
        settings: dict[str, Any] = {"block_size": 32, "blocks": 160}
        runners = {
            "on": Runner(model, {"host_memory": "128MiB", "min_load_tokens": 0}, **settings),
            "off": Runner(model, **settings),
        }
        try:
            for tokens in TOKENS:
                ids = prompt(tokens + 1, seed=tokens)
                taken = compare(runners, lambda one, _, ids=ids: one.first_token(ids, forget=True), arguments.rounds)
                results.append({"tokens": tokens, "load_ms": taken["on_ms"], "compute_ms": taken["off_ms"]} | taken)
        finally:
            for runner in runners.values():
                runner.close()
    if arguments.json:
        print(json.dumps(results))
        return
    print("| tokens | load, compute ms (p50) | noise ms |")
    print("| --- | --- | --- |")
    for r in results:
        print(f"| {r['tokens']} | {r['load_ms']:.2f}, {r['compute_ms']:.2f} | {r['noise_ms']:.2f} |")


if __name__ == "__main__":
    main()
