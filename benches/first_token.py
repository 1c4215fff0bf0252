"""What the connector adds to a request's time to first token, and to its engine steps.

    python benches/first_token.py [--rounds 100] [--tokens 1024] [--json]

Two real vLLM engines on the CPU platform, one with undercroft and one without, take turns with the same prompt: one
that the device's own prefix cache holds, one that nobody holds, and one that host memory holds (and the engine without
undercroft computes). "noise" is the difference between two halves of the rounds without undercroft.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from engines import Ask, Runner, compare

from real_engine import prompt, set_environment


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_environment()
    from tiny_models import make_llama

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
