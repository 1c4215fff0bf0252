"""The way of blocks from disk into a program's own memory, through host memory of several sizes.

    python benches/tier_memory.py [--rounds 5] [--mib 1024] [--sizes 2048,512,256,128] [--directory DIR]

A chain is saved, and the cache ends. For each size of ``host_memory``, in turn, a new cache loads the chain into memory
of this program that has its pages already. A chain that does not fit is loaded part by part, as vLLM's offloading does.
Nothing of the directory is in the page cache. Reads count until a part is in the cache's memory, and copies from then
on until it is in the program's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from page_cache import forget_pages

from undercroft.embed import Blocks, Cache, Group, chain

TOKENS, SIZE = 16, 1 << 20
IDENTITY = {"benchmark": "tier_memory"}


def opened(directory: str, host_mib: int, mib: int) -> Cache:
    """A cache that has populated its memory."""
    options: dict[str, Any] = {
        "disk_path": directory,
        "disk_capacity": (mib + mib // 2) << 20,
        "host_memory": host_mib << 20,
    }
    cache = Cache.open(options, IDENTITY, [Group((SIZE,))], TOKENS)
    while any("undercroft-pref" in path.read_text() for path in Path("/proc/self/task").glob("*/comm")):
        time.sleep(0.01)
    return cache


def blocks(address: int, first: int, end: int) -> list[Blocks]:
    """Blocks of the chain, each in the row of its number."""
    numbers = np.arange(first, end)
    return [Blocks(0, numbers, address + numbers * SIZE)]


def load(cache: Cache, keys: list[bytes], pool: np.ndarray) -> dict[str, float]:
    """Load the whole chain: milliseconds of the parts of the way."""
    address, begin = cache.add_region(pool), time.perf_counter()
    found = {"reads": 0.0, "copies": 0.0, "parts": 0.0}
    done = 0
    while done < len(keys):
        start = time.perf_counter()
        hit = cache.find("prompt", keys, begin=done * TOKENS)
        while hit.pending:
            cache.wait("prompt", 10.0)
            hit = cache.find("prompt", keys, begin=done * TOKENS)
        middle, end = time.perf_counter(), hit.tokens // TOKENS
        if end <= done:
            raise RuntimeError(f"block {done} of {len(keys)} was not found")
        job = cache.begin_load("prompt", blocks(address, done, end), begin=done * TOKENS, end=hit.tokens)
        cache.drain()
        if not job.complete:
            raise RuntimeError(f"blocks {done} to {end} were not copied")
        found["reads"] += 1e3 * (middle - start)
        found["copies"] += 1e3 * (time.perf_counter() - middle)
        found["parts"] += 1
        done = end
    found["all"] = 1e3 * (time.perf_counter() - begin)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="size of the chain")
    parser.add_argument("--sizes", default="2048,512,256,128", help="host_memory in MiB")
    parser.add_argument("--directory", help="on the disk to measure")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    keys = chain(number.to_bytes(4, "little") for number in range(arguments.mib))
    pool = np.random.default_rng(0).integers(0, 256, (arguments.mib, SIZE), np.uint8)
    taken: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        with opened(directory, max(sizes), arguments.mib) as cache:
            saved = cache.save(keys, blocks(cache.add_region(pool), 0, len(keys)), timeout_s=120.0)
            if not (saved.complete and cache.engine.flush(120.0)):
                sys.exit("error: the chain was not saved")
        expected, pool[:] = pool.copy(), 0
        for number in range(arguments.rounds):
            for size in sizes[:: -1 if number % 2 else 1]:
                forget_pages(Path(directory))
                pool[:] = 0
                with opened(directory, size, arguments.mib) as cache:
                    taken[size].append(load(cache, keys, pool))
                if not (pool == expected).all():
                    sys.exit("error: the bytes differ")
    print("| host_memory | parts | reads | copies | all, a GiB (least, most) |\n| --- | --- | --- | --- | --- |")
    for size, rounds in taken.items():
        of = {name: [1024 / arguments.mib * one[name] for one in rounds] for name in ("reads", "copies", "all")}
        reads, copies, whole = (statistics.median(of[name]) for name in of)
        spread = f"{whole:.0f} ms ({min(of['all']):.0f}, {max(of['all']):.0f})"
        print(f"| {size} MiB | {rounds[-1]['parts']:.0f} | {reads:.0f} ms | {copies:.0f} ms | {spread} |")


if __name__ == "__main__":
    main()
