"""Agents that pause between their turns: the time to first token of each turn, with and without hints.

    python benches/agents.py [--turns 43 | --returns] [--disk-mb-s 40] [--json]

One real vLLM engine on the CPU platform, whose disk is read at `--disk-mb-s`. A session has a system prompt and 43
turns, the median of vLLM's AgentX figures. Each turn adds half a block of tool output. In each pause other prompts turn
the host memory over, and in four of nine a sub-agent, which shares the system prompt, runs. The ways:

- "resident": without pauses. The conversation is in host memory: the best there is.
- "none": no hints. Each turn reads the conversation from disk.
- "prefetch": before each turn a request of hints alone (`prefetch`, nothing computed) with the conversation.
- "pin": each turn pins the conversation under one name.

`--returns`: sessions that come in turn after equal pauses, of which host memory holds a third, without hints. The
engine learns the pauses, and reads each session before its next turn.

At the end of "pin" other prompts turn the cache over ten times more, and the conversation is asked for once more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import Runner, with_faults

from engine_checks import BLOCK, PAYLOAD, flush, stats
from real_engine import prompt, set_environment

SYSTEM = prompt(4 * BLOCK, seed=1)
TURN = BLOCK // 2
HOST_BLOCKS = 96
WAYS = ("resident", "none", "prefetch", "pin")


class Sessions:
    """One engine, and the sessions of agents on it."""

    def __init__(self, model: Path, disk: Path, disk_mb_s: float) -> None:
        options = {
            "host_memory": HOST_BLOCKS * PAYLOAD,
            "pin_memory": "40%",
            "disk_path": str(disk),
            "disk_capacity": "4GiB",
        }
        self.runner = Runner(model, options, blocks=80)
        self.runner.engine.connector._engine.limit_reads(int(disk_mb_s * 1e6))
        self._others = 1000

    def turn_over(self, times: float) -> None:
        """Other prompts fill the host memory so many times."""
        with self.runner as engine:
            for _ in range(int(times * HOST_BLOCKS / 7) + 1):
                self._others += 1
                engine.generate(prompt(7 * BLOCK + 1, seed=self._others), 1)
            engine.idle_steps()
            flush(engine)

    def run(self, way: str, turns: int) -> dict[str, Any]:
        """One session."""
        ids = SYSTEM + prompt(BLOCK, seed=10 + WAYS.index(way))
        seconds, read, hits = [], 0, 0
        for turn in range(turns):
            ids = ids + prompt(TURN, seed=200 + turn)
            if way != "resident" and turn:
                self.turn_over(1.2)
                if turn % 9 < 4:
                    self.ask(SYSTEM + prompt(BLOCK, seed=500 + turn))
            self._forget_device()
            if way == "prefetch" and turn:
                self._prefetch(ids)
            before = self._reads()
            hints = {"pin": {"ttl_s": 3600, "id": "agent"}} if way == "pin" else None
            taken, cached = self.ask(ids, hints)
            if turn:
                seconds.append(taken * 1e3)
                read += self._reads() - before
                hits += cached
        return {
            "median_ms": statistics.median(seconds),
            "p90_ms": statistics.quantiles(seconds, n=10)[-1],
            "blocks_read_in_turns": read,
            "cached_tokens": hits,
            "ids": ids,
        }

    def ask(self, ids: list[int], hints: dict[str, Any] | None = None) -> tuple[float, int]:
        """Seconds of a request of one token, and its tokens that were cached."""
        with self.runner as engine:
            start = time.perf_counter()
            found = engine.generate(ids, 1, params={"kv_hints": hints} if hints else None)
            seconds = time.perf_counter() - start
            engine.idle_steps()
            flush(engine)
        return seconds, found.cached

    def run_returns(self, count: int, turns: int, pause_s: float) -> dict[str, Any]:
        """Sessions of 12 blocks in turn. By turn: times, and the share without a read; the last turn again at once."""
        taken: list[list[float]] = [[] for _ in range(turns)]
        at_once: list[list[bool]] = [[] for _ in range(turns)]
        again = []
        ids = [prompt(12 * BLOCK, seed=3000 + session) for session in range(count)]
        start = time.monotonic()
        for turn in range(turns):
            for session in range(count):
                due = start + pause_s * (turn + session / count)
                with self.runner:
                    time.sleep(max(0.0, due - time.monotonic()))
                self._forget_device()
                ids[session] = ids[session] + prompt(TURN, seed=200 + turn)
                with self.runner as engine:
                    before, began = self._reads(), time.perf_counter()
                    cached = engine.generate(ids[session], 1).cached
                    taken[turn].append((time.perf_counter() - began) * 1e3)
                    # Not counted: what is read for the next session in the rest of the step.
                    at_once[turn].append(self._reads() == before and cached > 0)
                    engine.idle_steps()
                    flush(engine)
                if turn == turns - 1:
                    self._forget_device()
                    again.append(self.ask(ids[session])[0] * 1e3)
        found = stats(self.runner.engine)
        return {
            "median_ms": [statistics.median(of) for of in taken],
            "p90_ms": [statistics.quantiles(of, n=10)[-1] for of in taken],
            "at_once": [sum(of) / count for of in at_once],
            "again_ms": statistics.median(again),
            "used": found["return_reads_used"],
            "wasted": found["return_reads_wasted"],
        }

    def _prefetch(self, ids: list[int]) -> None:
        with self.runner as engine:
            engine.generate(ids, 1, params={"kv_hints": {"prefetch": True, "compute": False}})
            engine.idle_steps()
            # The rest of the pause.
            deadline = time.monotonic() + 30
            while stats(engine)["active_lookups"] and time.monotonic() < deadline:
                time.sleep(0.001)

    def _forget_device(self) -> None:
        with self.runner as engine:
            engine.idle_steps()
            if not engine.reset_device_cache():
                raise RuntimeError("the device's cache is in use")

    def _reads(self) -> int:
        return int(stats(self.runner.engine)["disk_reads"])


def measure_returns(disk_mb_s: float) -> dict[str, Any]:
    """The figures of sessions that come back after equal pauses."""
    set_environment()
    from tiny_models import make_llama

    with_faults()
    with tempfile.TemporaryDirectory() as folder:
        sessions = Sessions(make_llama(Path(folder) / "model"), Path(folder) / "cache", disk_mb_s)
        found = sessions.run_returns(count=20, turns=9, pause_s=14.0)
        sessions.runner.close()
    return found


def measure(turns: int, disk_mb_s: float) -> dict[str, Any]:
    """The figures of each way."""
    set_environment()
    from tiny_models import make_llama

    with_faults()
    with tempfile.TemporaryDirectory() as folder:
        sessions = Sessions(make_llama(Path(folder) / "model"), Path(folder) / "cache", disk_mb_s)
        found: dict[str, Any] = {way: sessions.run(way, turns) for way in WAYS}
        ids = found["pin"]["ids"]
        sessions.turn_over(10)
        sessions._forget_device()
        before = sessions._reads()
        _, cached = sessions.ask(ids)
        whole = (len(ids) - 1) // BLOCK * BLOCK
        found["after_ten_turnovers"] = {
            "cached": cached / whole,
            "blocks_read": sessions._reads() - before,
        }
        for way in WAYS:
            del found[way]["ids"]
        sessions.runner.close()
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=43)
    parser.add_argument("--disk-mb-s", type=float, default=40)
    parser.add_argument("--returns", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.returns:
        print(json.dumps(measure_returns(args.disk_mb_s)))
        return
    found = measure(args.turns, args.disk_mb_s)
    if args.json:
        print(json.dumps(found))
        return
    for way in WAYS:
        one = found[way]
        print(
            f"{way:9} median {one['median_ms']:7.1f} ms, p90 {one['p90_ms']:7.1f} ms, "
            f"{one['blocks_read_in_turns']} blocks read in turns, {one['cached_tokens']} tokens cached"
        )
    last = found["after_ten_turnovers"]
    print(f"pinned, after ten more turnovers: {last['cached']:.0%} cached, {last['blocks_read']} blocks read from disk")


if __name__ == "__main__":
    main()
