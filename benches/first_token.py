"""The time that the connector adds to a request's first token, and to its engine steps.

    python benches/first_token.py [--rounds 100] [--tokens 1024] [--json]

Two real vLLM engines on the CPU platform, one with undercroft and its planner and one without, take turns with the same
prompt: one that the device's own prefix cache holds, one that is not cached, and one that host memory holds (and the
engine without undercroft computes). In two lines the engine beside it has undercroft without the planner. "noise"
is the difference between two halves of the rounds of the other engine, and "twin" that of a second engine without
undercroft to the first. "in our calls": processor time in the connector's hooks, and its part of that of the request.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path

from engines import OURS, Ask, FirstToken, Runner, compare

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
    seeds = itertools.count(10)

    def cold(one: Runner, _turn: int) -> FirstToken:
        return one.first_token(prompt(arguments.tokens + 1, seed=next(seeds)), forget=True)

    in_host: Ask = lambda one, turn: one.first_token(known, forget=True)  # noqa: E731
    cases: dict[str, tuple[str, Ask]] = {
        "on the device": ("off", lambda one, turn: one.first_token(known)),
        "nowhere": ("off", cold),
        "nowhere, beside no planner": ("unplanned", cold),
        "in host memory": ("off", in_host),
        "in host memory, beside no planner": ("unplanned", in_host),
    }
    with tempfile.TemporaryDirectory() as root:
        model = make_llama(Path(root) / "llama")
        planned = {"promotion_wait": "planned", "min_load_tokens": None}

        def runner(name: str, options: dict[str, object]) -> Runner:
            disk = {"disk_path": str(Path(root) / name), "disk_capacity": "1GiB"}
            return Runner(model, {"host_memory": "512MiB", **disk, **options}, blocks=256)

        runners = {"on": runner("on", planned), "unplanned": runner("unplanned", {}), "off": Runner(model, blocks=256)}
        runners["twin"] = Runner(model, blocks=256)
        OURS.measure()
        try:
            results = []
            for name, (beside, ask) in cases.items():
                sides = {"on": runners["on"], "off": runners[beside]}
                if name in ("on the device", "nowhere"):
                    sides["twin"] = runners["twin"]
                results.append({"prompt": name} | compare(sides, ask, arguments.rounds))
        finally:
            for runner in runners.values():
                runner.close()
    if arguments.json:
        print(json.dumps(results))
        return
    print("| prompt | with, without ms (p50) | added ms (noise, twin) | in our calls | steps with, without | before |")
    print("| --- | --- | --- | --- | --- | --- |")
    for r in results:
        noise = f"{r['noise_ms']:.2f}" + (f", {r['twin_ms']:+.2f}" if "twin_ms" in r else "")
        times = f"{r['on_ms']:.2f}, {r['off_ms']:.2f} | {r['added_ms']:+.2f} ({noise})"
        times += f" | {r['ours_ms']:.2f}, {r['ours_ms'] / r['on_cpu_ms']:.1%} of {r['on_cpu_ms']:.2f}"
        print(f"| {r['prompt']} | {times} | {r['on_steps']}, {r['off_steps']} | {r['on_steps_before']} |")


if __name__ == "__main__":
    main()
