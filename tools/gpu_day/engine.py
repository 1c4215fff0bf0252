"""An engine of an 8B shape with dummy weights: seconds to the first token, and decode steps beside copies.

Writes its results after each measurement. Runs in the environment of `gpu_day`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fake_device
from undercroft.units import parse_size


class Sizes(NamedTuple):
    """A model, and the prompts."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    prompts: tuple[int, ...]
    decodes: int
    tokens: int
    """Of each request that decodes."""
    host_memory: str


LARGE = Sizes(4096, 14336, 32, 32, 8, 128, 128256, (8 << 10, 32 << 10, 128 << 10), 32, 400, "40GiB")
CHUNK = 8192
"""Tokens of a large model's step, at most."""
SMALL = Sizes(64, 128, 2, 4, 2, 32, 1000, (64, 128, 256), 2, 12, "64MiB")
ROUNDS = 3
"""Prompts that are saved or loaded beside the decodes."""
PAUSE_S = 0.001


def main() -> int:
    """0 unless something raises: these are figures, and no tokens to compare."""
    parser = argparse.ArgumentParser(prog="engine", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--gather-below", type=parse_size, help="as the option gather_below")
    parser.add_argument("--longest", type=int, help="tokens of the longest prompt (all lengths)")
    options = parser.parse_args()
    if fake_device.is_loaded():
        torch.cuda.init()
        fake_device.prepare()
    sizes = SMALL if options.small else LARGE
    found: dict[str, Any] = {"gather_below": options.gather_below, "first token": []}

    def write() -> None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    with fake_device.computing(), tempfile.TemporaryDirectory() as directory:
        begin = time.perf_counter()
        one = engine(sizes, Path(directory), options.gather_below, small=options.small)
        found["start_s"] = round(time.perf_counter() - begin, 1)
        pause(one)
        one.generate_all([prompt(sizes, 32, 99)] * sizes.decodes, 4)
        settle(one)
        for length in sizes.prompts:
            if options.longest and length > options.longest:
                break
            found["first token"].append(first_token(one, sizes, length))
            write()
        found["decode steps"] = beside(one, sizes)
        write()
        one.close()
    return 0


def engine(sizes: Sizes, directory: Path, gather_below: int | None, *, small: bool) -> Any:
    """Starts it. The tokenizer is left out, and weights are random."""
    from real_engine import Engine

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 2 * sizes.prompts[-1],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    Path(directory, "config.json").write_text(json.dumps(config), encoding="utf-8")
    options: dict[str, Any] = {"host_memory": sizes.host_memory}
    if gather_below is not None:
        options["gather_below"] = gather_below
    large = {
        "gpu_memory_utilization": 0.85,
        "kv_cache_memory_bytes": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": CHUNK,
        "dtype": "bfloat16",
        "enforce_eager": False,
        "compilation_config": {
            **fake_device.ENGINE["compilation_config"],
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [sizes.decodes, sizes.decodes + 8],
        },
    }
    arguments = {**fake_device.ENGINE, **({} if small else large), "max_model_len": sizes.prompts[-1] + 256}
    return Engine(directory, options, load_format="dummy", **arguments)


def pause(one: Any) -> None:
    """Sleep after steps in which no model ran and requests wait, as vLLM's own loop does.

    See ``_process_engine_step`` in vllm/v1/engine/core.py. A loop without pauses keeps Python's lock from the threads
    that queue copies.
    """
    step = one.core.step_fn

    def paused() -> tuple[Any, bool]:
        outputs, model_executed = step()
        if not model_executed and one.scheduler.has_requests():
            time.sleep(PAUSE_S)
        return outputs, model_executed

    one.core.step_fn = paused


def prompt(sizes: Sizes, length: int, seed: int) -> list[int]:
    """Token ids that no other seed shares."""
    return [3 + (7 * i + 7919 * seed + i // 31 * (seed + 1)) % (sizes.vocab - 10) for i in range(length)]


def settle(one: Any) -> None:
    """End all copies, and empty the device's cache."""
    one.idle_steps(50_000_000)
    if not one.reset_device_cache():
        raise RuntimeError("blocks of the device are in use although nothing runs")


def first_token(one: Any, sizes: Sizes, length: int) -> dict[str, Any]:
    """Seconds to the first token of a prompt, computed and then loaded."""
    # Another prompt brings all kernels into being: those of a first chunk, and of one that has others before it.
    one.generate(prompt(sizes, min(length, 2 * CHUNK), length + 1), 1)
    settle(one)
    ids = prompt(sizes, length, length)
    took, cached = [], []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        answer = one.generate(ids, 1)
        took.append(time.perf_counter() - begin)
        cached.append(answer.cached)
        settle(one)
    return {
        "tokens": length,
        "computed_s": round(took[0], 4),
        "loaded_s": round(min(took[1:]), 4),
        "loaded_all_s": [round(one, 4) for one in took[1:]],
        "loaded_tokens": cached[1:],
    }


def beside(one: Any, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of steps in which only decodes are computed: alone, beside saves, and beside loads."""
    from engine_checks import add, stats

    tokens: list[int] = []
    schedule = one.scheduler.schedule

    def noting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        tokens.append(output.total_num_scheduled_tokens)
        return output

    one.scheduler.schedule = noting
    length = sizes.prompts[1]
    steps: dict[str, list[float]] = defaultdict(list)

    def run(name: str, prompts: list[list[int]], until: int) -> None:
        for nth in range(sizes.decodes):
            add(one, f"{name} {nth}", prompt(sizes, 32, 1000 + nth), sizes.tokens)
        for step in range(until):
            if prompts and step % (until // (len(prompts) + 1)) == 4:
                add(one, f"{name} long {step}", prompts.pop(), 1)
            before = stats(one)
            begin = time.perf_counter()
            one.llm.llm_engine.step()
            took = (time.perf_counter() - begin) * 1e3
            # Prompts are computed in steps of more tokens.
            if tokens and tokens[-1] == sizes.decodes:
                kind = "loads" if before["loads"] else "saves" if before["saves"] else "alone"
                steps[kind].append(took)
        while one.llm.llm_engine.has_unfinished_requests():
            one.llm.llm_engine.step()
        settle(one)

    long = [prompt(sizes, length, 50 + nth) for nth in range(ROUNDS)]
    run("alone", [], sizes.tokens - 4)
    run("saving", list(long), sizes.tokens - 4)
    run("loading", list(long), sizes.tokens - 4)
    return {kind: summary(took) for kind, took in steps.items()}


def summary(took: list[float]) -> dict[str, Any]:
    """Of the times of steps."""
    return {"steps": len(took), "median_ms": round(statistics.median(took), 3), "longest_ms": round(max(took), 3)}


if __name__ == "__main__":
    sys.exit(main())
