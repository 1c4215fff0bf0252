"""Processes with the back end that are killed while they load and save: ``killed.py DISK KILLS SEED``.

Prints, as JSON, the operations of each life: "." found nothing, "h" found right pages, "W" found wrong ones.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import sys
import time

import torch

from host_pools import after, fill, keys, mha, opened, wipe, wrong

PROMPTS, PAGES_MAX = 120, 32
LIFE_S = 20.0
"""Longest life of a process; it takes a second or less."""
_PR_SET_PDEATHSIG = 1


def work(disk: str, seed: int, pipe: int, operations: int) -> None:
    """Load and save prompts at random, and check each page that comes. The disk is too small for all of them."""
    numbers, pool = random.Random(seed), mha()
    store = opened(disk, pool, host_memory="16MiB", disk_capacity="24MiB")
    for _ in range(operations):
        chain = keys(f"prompt {numbers.randrange(PROMPTS)}", numbers.randrange(1, PAGES_MAX))
        places = range(len(chain))
        got = store.batch_get_v1(chain, wipe(pool, places), after())
        is_wrong = bool(wrong(pool, places, chain, got))
        store.batch_set_v1(chain, fill(pool, places, chain), after())
        os.write(pipe, b"W" if is_wrong else b"h" if any(got) else b".")
    store.close()


def life(disk: str, numbers: random.Random, *, is_last: bool) -> tuple[str, int]:
    """A process from its start to its end. Returns its operations and its status."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        # It ends with this process, and in any case.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.alarm(int(LIFE_S))
        torch.set_num_threads(1)
        try:
            work(disk, numbers.randrange(1 << 32), writes, 60 if is_last else 1 << 30)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    os.close(writes)
    if not is_last:
        if numbers.random() < 0.8:  # else it is killed while it starts
            select.select([reads], [], [], LIFE_S)
        time.sleep(numbers.uniform(0.0, 0.4))
        os.kill(child, signal.SIGKILL)
    found = b""
    while piece := os.read(reads, 1 << 16):
        found += piece
    os.close(reads)
    return found.decode(), os.waitpid(child, 0)[1]


def main() -> None:
    """Command line."""
    disk, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    numbers = random.Random(seed)
    lives = [life(disk, numbers, is_last=number == kills) for number in range(kills + 1)]
    print(json.dumps(lives))


if __name__ == "__main__":
    main()
