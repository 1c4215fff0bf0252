"""How much of a conversation hits, turn by turn: hybrid models against full attention of the same shape.

    python benches/hybrid_multi_turn.py [--turns 4] [--json]

Real vLLM engines on the CPU platform. The device's own cache is emptied between turns, so that every hit is from host
memory. A turn is the whole conversation so far and some new tokens. "kept" is vLLM's own
prefix_cache_retention_interval: the states that it keeps, and so hands out, between the ends of prompts. "hits at" is
its prefix_match_unit: hits may end inside a block.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm"))

from real_engine import Engine, prompt, set_environment

FIRST = 1300
"""Tokens of the first prompt."""
NEW = 250
"""New tokens of every further turn."""
ANSWER = 100


def conversation(running: Engine, turns: int) -> tuple[int, int]:
    """(tokens that hit, tokens that could have: all that an earlier turn had computed)."""
    ids = prompt(FIRST)
    hit = could = computed = 0
    for turn in range(turns):
        answer = running.generate(ids, ANSWER)
        if turn:
            hit += answer.cached
            could += computed
        computed = len(ids) + len(answer.tokens) - 1
        ids = ids + answer.tokens + prompt(NEW, seed=turn + 1)
        running.idle_steps()
        if not running.reset_device_cache():
            raise RuntimeError("the device's cache is in use")
    return hit, could


def all_full(directory: Path) -> Path:
    """Makes every layer of a model full attention."""
    config = json.loads((directory / "config.json").read_text())
    config["layer_types"] = ["full_attention"] * len(config["layer_types"])
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_environment()
    from tiny_models import make_gemma2, make_qwen3_next

    with tempfile.TemporaryDirectory() as root:
        gemma, qwen = make_gemma2(Path(root) / "gemma"), make_qwen3_next(Path(root) / "qwen")
        cases: list[tuple[str, Path, dict[str, Any]]] = [
            ("full attention, blocks of 128", all_full(make_gemma2(Path(root) / "full")), {"dtype": "float32"}),
            ("window of 256 and full attention, blocks of 128", gemma, {"dtype": "float32"}),
            ("linear and full attention, blocks of 640", qwen, {"dtype": "bfloat16"}),
            (
                "linear and full attention, blocks of 640, kept 640",
                qwen,
                {"dtype": "bfloat16", "prefix_cache_retention_interval": 640},
            ),
            (
                "linear and full attention, blocks of 640, hits at 64",
                qwen,
                {"dtype": "bfloat16", "prefix_match_unit": 64},
            ),
        ]
        results = []
        for name, directory, settings in cases:
            running = Engine(directory, {"host_memory": "128MiB"}, max_model_len=4096, blocks=128, **settings)
            hit, could = conversation(running, arguments.turns)
            running.close()
            results.append({"model": name, "hit_tokens": hit, "possible_tokens": could, "share": hit / could})
    if arguments.json:
        print(json.dumps(results))
        return
    print("| model | tokens that hit | of those computed before | share |")
    print("| --- | --- | --- | --- |")
    for result in results:
        numbers = f"{result['hit_tokens']} | {result['possible_tokens']} | {result['share']:.0%}"
        print(f"| {result['model']} | {numbers} |")


if __name__ == "__main__":
    main()
