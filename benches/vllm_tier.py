"""Undercroft and vLLM's own file tier below vLLM's offloading, in turn, on real engines on the CPU platform.

    python benches/vllm_tier.py [--rounds 3] [--prompts 12] [--tokens 2048] [--directory DIR] [--json]

Each round runs each tier in a process and a directory of its own. The prompts are computed and saved, and the engine
ends. Nothing of the directory stays in the page cache. A new engine then gets half of the prompts one after the other,
and the other half at once. At last, conversations of several turns run in an engine whose own memory holds a quarter of
them. Each engine has populated its memory and answered a short prompt before. The copies between the device and vLLM's
memory are the same memmove for both tiers. Every answer must be equal for both. The rate of reads counts from a
prompt's arrival until its chunks are in vLLM's memory, the rate of writes from the start of a prompt's save until it is
on disk. The device's own rates are those of a bare loop in each round.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm"))

from page_cache import forget_pages

from real_engine import Engine, prompt, set_environment

BLOCK = 32
TIERS = ("undercroft", "fs")
SPARE_MIB = 512
"""Free space beside the chunks: the model, and what a filesystem needs for itself."""
CONVERSATIONS, TURNS, NEW, ANSWER = 8, 4, 384, 8
ROWS = {
    "save_s": "computing and saving all prompts, until they are on disk (s)",
    "save_cpu_s": "processor time of that (s)",
    "first_token_ms": "first token after a restart, one prompt at a time (ms)",
    "planned_first_token_ms": "the same with default options (ms)",
    "read_s_per_gib": "reads for one prompt at a time (s a GiB)",
    "write_s_per_gib": "writes for one prompt at a time, until they are on disk (s a GiB)",
    "together_s": "half of the prompts at once after a restart (s)",
    "lookup_us": "lookups of a prompt on the scheduler's thread (µs)",
    "submit_load_us": "the start of a load on that thread (µs)",
    "submit_store_us": "the start of a save on that thread (µs)",
    "calls_us": "all calls of the tier for a prompt on that thread (µs)",
    "turns_s": "conversations of several turns (s)",
}
"""Lower is better in each."""
DEVICE = {"read_s_per_gib": "raw_read_gbps", "write_s_per_gib": "raw_write_gbps"}
"""Rows that are also told as shares of the device, and the device's figure: a bare O_DIRECT loop, 32 MiB in flight."""


def model(root: Path) -> Path:
    """A model with 32 KiB of KV for a token, so that a chunk has 1 MiB."""
    from tiny_models import Shape, make_llama

    shape = Shape(hidden=128, intermediate=256, layers=8, heads=8, kv_heads=8, head_dim=64)
    return make_llama(root / "model", shape)


def options(tier: str, directory: Path, rows: int, capacity: int, *, planned: bool) -> dict[str, Any]:
    """Of vLLM's offloading connector with one tier."""
    entry: dict[str, Any] = {"type": "fs", "root_dir": str(directory)}
    if tier == "undercroft":
        entry = {
            "type": "UndercroftTier",
            "module_path": "undercroft.vllm_tier",
            "disk_path": str(directory),
            "disk_capacity": str(capacity),
        }
        entry |= {} if planned else {"promotion_wait": "complete"}
    return {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_tier_spec",
        "cpu_bytes_to_use": rows << 20,
        "offload_prompt_only": False,
        "secondary_tiers": [entry],
    }


class Times:
    """Time of the scheduler's thread in the calls of a tier's class, and the times at which loads have ended.

    The time of reading the clock is left out: a tier of undercroft has more calls, each of which does little.
    """

    CALLS = (
        *("lookup", "on_new_request", "on_request_finished", "submit_load", "submit_store", "get_finished_jobs"),
        *("on_schedule_end", "touch", "serve_external_requests", "has_pending_work"),
        *("arrives", "is_asked", "is_scheduled", "step_ends"),
    )

    def __init__(self, tier: str) -> None:
        """Measure from now on."""
        if tier == "fs":
            from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager as Tier
        else:
            from undercroft.vllm_tier.tier import UndercroftTier as Tier
        self.lookups = self.calls = 0.0
        self.starts: dict[str, list[float]] = {"submit_load": [], "submit_store": []}
        """Time of each start of a load or save."""
        self.loaded = 0
        self.loaded_at = 0.0
        self._loading: dict[int, int] = {}
        self.saved = 0
        self.saved_from = math.inf
        """Chunks of saves, and the time at which the first of them began."""
        self._clock_s = min(-(time.thread_time() - time.thread_time()) for _ in range(1000))
        for name in self.CALLS:
            if hasattr(Tier, name):
                setattr(Tier, name, self._timed(name, getattr(Tier, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(tier: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "submit_store":
                self.saved += len(args[0].keys)
                self.saved_from = min(self.saved_from, time.perf_counter())
            start = time.thread_time()
            answer = call(tier, *args, **kwargs)
            if name == "get_finished_jobs":
                answer = list(answer)
            taken = max(0.0, time.thread_time() - start - self._clock_s)
            self.calls += taken
            self.lookups += taken * (name == "lookup")
            if name in self.starts:
                self.starts[name].append(taken)
            if name == "submit_load":
                self._loading[args[0].job_id] = len(args[0].keys)
            for ended in answer if name == "get_finished_jobs" else ():
                if (count := self._loading.pop(ended.job_id, None)) is not None:
                    self.loaded += count
                    self.loaded_at = time.perf_counter()
            return answer

        return timed


@contextmanager
def started(*args: Any, **kwargs: Any) -> Iterator[Engine]:
    """An engine with a tier, which ends afterwards. undercroft has populated its memory, as vLLM has its own."""
    one = Engine(*args, connector="OffloadingConnector", block_size=BLOCK, **kwargs)
    try:
        while any("undercroft-pref" in path.read_text() for path in Path("/proc/self/task").glob("*/comm")):
            time.sleep(0.01)
        one.generate(prompt(BLOCK + 1), 1)
        rest(one)
        yield one
    finally:
        one.close()


def rest(one: Engine) -> None:
    """All that is saved is on disk, and the device's own cache is empty."""
    one.idle_steps()
    [tier] = one.connector.connector_scheduler.manager.secondary_tiers
    if hasattr(tier, "_cache"):
        if not tier._cache.engine.flush(60.0):
            raise RuntimeError("undercroft has not written everything within a minute")
        [disk] = tier._cache.engine.info()["disks"]
        if disk["health"] != "good" or not disk["o_direct"]:
            raise RuntimeError(f"undercroft's disk: health {disk['health']}, O_DIRECT {disk['o_direct']}")
    elif not tier._use_o_direct:
        raise RuntimeError("vLLM's file tier uses no O_DIRECT")
    one.reset_device_cache()


def check_disk(directory: Path, prompts: int, tokens: int) -> None:
    """Exit unless the directory is on a disk that both tiers use with O_DIRECT, with room for one of them."""
    from undercroft.cli.doctor.system import device, direct_io

    for found in (direct_io(directory), *device(directory)):
        if found.status != "ok":
            sys.exit(f"error: {found.found}. Name a directory on a local disk with --directory.")
    free, needed = shutil.disk_usage(directory).free >> 20, (capacity(prompts, tokens) >> 20) + SPARE_MIB
    if free < needed:
        sys.exit(f"error: {directory} has {free} MiB free, {needed} are needed. Name a directory with --directory.")


def capacity(prompts: int, tokens: int) -> int:
    """Bytes of disk for all chunks of a round, and half as much again."""
    chunks = (prompts + prompts // 2) * (tokens // BLOCK) + CONVERSATIONS * (TURNS * NEW // BLOCK)
    return (chunks + chunks // 2) << 20


def processor_s() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def write_s_per_gib(one: Engine, times: Times, prompts: int, tokens: int) -> float:
    """Time of saving a GiB, from the start of a prompt's save until it is on disk."""
    found = []
    for number in range(prompts):
        times.saved, times.saved_from = 0, math.inf
        one.generate(prompt(tokens + 1, seed=300 + number), 1)
        rest(one)
        found.append((time.perf_counter() - times.saved_from) / (times.saved / 1024))
    return statistics.median(found)


def measure(tier: str, root: Path, directory: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """One round of one tier."""
    set_environment()
    llama, rows, room = model(root), prompts * (tokens // BLOCK) + 16, capacity(prompts, tokens)
    settings = {"max_model_len": tokens + 1024, "blocks": 2 * rows, "max_num_seqs": 8}
    asked = [prompt(tokens + 1, seed=200 + number) for number in range(prompts)]
    found: dict[str, Any] = {"answers": []}

    times = Times(tier)
    with started(llama, options(tier, directory, rows, room, planned=False), **settings) as one:
        times.starts["submit_store"].clear()
        begin, cpu = time.perf_counter(), processor_s()
        found["answers"] += [one.generate(ids, 2).tokens for ids in asked]
        rest(one)
        found["save_s"], found["save_cpu_s"] = time.perf_counter() - begin, processor_s() - cpu
        found["write_s_per_gib"] = write_s_per_gib(one, times, prompts // 2, tokens)
    found["submit_store_us"] = 1e6 * statistics.median(times.starts["submit_store"])
    found["disk_mib"] = sum(path.stat().st_blocks for path in directory.rglob("*")) >> 11

    half = prompts // 2
    forget_pages(directory)
    with started(llama, options(tier, directory, rows, room, planned=False), **settings) as one:
        first, reads, cached = [], [], 0
        times.lookups = times.calls = 0.0
        times.starts["submit_load"].clear()
        for ids in asked[:half]:
            begin, loaded = time.perf_counter(), times.loaded
            answer = one.generate(ids, 1)
            first.append(time.perf_counter() - begin)
            reads.append((times.loaded_at - begin) / ((times.loaded - loaded) / 1024 or 1e-9))
            cached += answer.cached
            rest(one)
        if cached < half * tokens:
            raise RuntimeError(f"{half} prompts of {tokens} tokens hit {cached} tokens: not all came from disk")
        found["lookup_us"], found["calls_us"] = 1e6 * times.lookups / half, 1e6 * times.calls / half
        found["submit_load_us"] = 1e6 * statistics.median(times.starts["submit_load"])
        found["first_token_ms"] = 1e3 * statistics.median(first)
        found["read_s_per_gib"] = statistics.median(reads)
        begin = time.perf_counter()
        answers = one.generate_all(asked[half:], 1)
        found["together_s"] = time.perf_counter() - begin
        found["cached"] = [cached / half, sum(one.cached for one in answers) / len(answers)]
        found["answers"] += [answer.tokens for answer in answers]

    found["planned_first_token_ms"] = found["first_token_ms"]
    if tier == "undercroft":
        forget_pages(directory)
        with started(llama, options(tier, directory, rows, room, planned=True), **settings) as one:
            first, cached = [], 0
            for ids in asked[:half]:
                begin = time.perf_counter()
                cached += one.generate(ids, 1).cached
                first.append(time.perf_counter() - begin)
                rest(one)
            found["planned_first_token_ms"] = 1e3 * statistics.median(first)
            found["cached"].append(cached / half)

    longest = TURNS * NEW // BLOCK
    settings |= {"blocks": 4 * longest + 8, "max_num_seqs": 4}
    with started(llama, options(tier, directory, CONVERSATIONS * longest // 4, room, planned=True), **settings) as one:
        texts = [prompt(NEW, seed=400 + number) for number in range(CONVERSATIONS)]
        begin, cached = time.perf_counter(), 0
        for turn in range(TURNS):
            answers = one.generate_all(texts, ANSWER)
            cached += sum(answer.cached for answer in answers)
            found["answers"] += [answer.tokens for answer in answers]
            for number, answer in enumerate(answers):
                texts[number] = texts[number] + answer.tokens + prompt(NEW - ANSWER, seed=10 * turn + number)
        found["turns_s"] = time.perf_counter() - begin
        found["cached"].append(cached / CONVERSATIONS)
    return found


def run(tier: str, root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One round of one tier in a process of its own."""
    with tempfile.TemporaryDirectory(dir=root) as directory:
        command = [sys.executable, __file__, "--one", tier, "--directory", directory, "--model", str(root)]
        command += ["--prompts", str(arguments.prompts), "--tokens", str(arguments.tokens)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return dict(json.loads(ran.stdout.splitlines()[-1]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=TIERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        found = measure(arguments.one, arguments.model, arguments.directory, arguments.prompts, arguments.tokens)
        print(json.dumps(found))
        return
    check_disk(arguments.directory or Path(tempfile.gettempdir()), arguments.prompts, arguments.tokens)
    from undercroft_bench import _bench

    results: dict[str, list[dict[str, Any]]] = {tier: [] for tier in TIERS}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        for number in range(arguments.rounds):
            with tempfile.TemporaryDirectory(dir=root) as empty:
                device = _bench.disk(empty, 1 << 20, 512)
            for tier in TIERS[:: -1 if number % 2 else 1]:
                results[tier].append(run(tier, Path(root), arguments))
                for row, bare in DEVICE.items():
                    # Of one prompt's time, that of the device alone.
                    results[tier][-1][f"{row}_share"] = 2**30 / 1e9 / device[bare] / results[tier][-1][row]
                print(f"round {number + 1}, {tier}: {json.dumps(results[tier][-1])}", file=sys.stderr, flush=True)
            pair = [results[tier][-1].pop("answers") for tier in TIERS]
            if pair[0] != pair[1]:
                raise RuntimeError("the answers of the two tiers differ")
    if arguments.json:
        print(json.dumps(results))
        return
    print("| | undercroft | vLLM's file tier | file tier / undercroft: median (least, most) |")
    print("| --- | --- | --- | --- |")
    for key, name in ROWS.items():
        ours, theirs = ([one[key] for one in results[tier]] for tier in TIERS)
        ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
        figures = f"{statistics.median(ours):.3g} | {statistics.median(theirs):.3g}"
        print(f"| {name} | {figures} | {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f}) |")
    for row in DEVICE:
        shares = [statistics.median(one[f"{row}_share"] for one in results[tier]) for tier in TIERS]
        print(f"| share of the device: {ROWS[row]} | {shares[0]:.2f} | {shares[1]:.2f} | |")
    for tier in TIERS:
        last = results[tier][-1]
        print(
            f"{tier}: {last['disk_mib']} MiB on disk; tokens cached of a prompt: {[round(n) for n in last['cached']]}"
        )


if __name__ == "__main__":
    main()
