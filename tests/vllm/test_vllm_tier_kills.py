"""Engines with undercroft as a tier of vLLM's offloading, killed at random moments under load and started again.

`make soak-tier` kills `KILLS` of them, from the seed `SOAK_SEED`; the tests of each change kill some. Every answer of
every engine is compared with that of a vLLM without any cache, while the engine runs.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from connector_engine import References
from real_engine import Engine, fork_server, prompt
from tier_engine import extra_config, settled, stats

KILLS = int(os.environ.get("KILLS", "3"))
SEED = int(os.environ.get("SOAK_SEED", "7"))
LIFE_S = 1.5
"""Longest time from an engine's first answer to its end."""
TOKENS = 4
TRUNKS = [prompt(1025, seed=100 + number) for number in range(4)]
TURNS = [
    trunk[:length] + prompt(extra, seed=10 * number + extra)
    for number, trunk in enumerate(TRUNKS)
    for length, extra in ((257, 0), (513, 60), (769, 130), (1025, 0))
]
"""Conversations whose turns share their beginnings."""

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(KILLS * 60 + 600)]


def tier(directory: Path) -> dict[str, Any]:
    """Memory and a disk that do not hold everything."""
    return extra_config(directory, rows=12, disk_capacity="36MiB", host_memory="32MiB")


def live(model: Path, directory: Path, wanted: list[list[int]], name: str, seed: int, told: Connection) -> None:
    """Serve random turns until the process is killed. Tell of the answers: how many, cached tokens, the wrong ones."""
    one = Engine(model, tier(directory), connector="OffloadingConnector", transfer={"engine_id": name}, blocks=64)
    chance = random.Random(seed)
    while True:
        asked = chance.sample(range(len(TURNS)), chance.choice([1, 1, 2, 4]))
        answers = one.generate_all([TURNS[at] for at in asked], TOKENS)
        wrong = [at for at, answer in zip(asked, answers, strict=True) if answer.tokens != wanted[at]]
        told.send((len(asked), sum(answer.cached for answer in answers), wrong, stats(one)["checksum_failures"]))
        if chance.random() < 0.5:
            one.reset_device_cache()


class Life:
    """An engine in a process of its own."""

    def __init__(self, context: Any, number: int, arguments: tuple[Any, ...], counts: Counter[str]) -> None:
        self._number, self._counts = number, counts
        self._results, tells = context.Pipe(duplex=False)
        name = f"killed-{os.getpid()}-{number}"
        seed = SEED * 1000 + number
        self._process = context.Process(target=live, args=(*arguments, name, seed, tells), daemon=True)
        self._process.start()
        tells.close()
        # vLLM's own memory keeps its name if its engine is killed.
        self._memory = Path(f"/dev/shm/vllm_offload_{name}.mmap")

    def answers(self) -> None:
        """Wait for answers, which are right."""
        assert self._results.poll(300), f"life {self._number} does not answer"
        answers, cached, wrong, damaged = self._results.recv()
        self._counts += Counter(answers=answers, cached=cached)
        assert not wrong, f"life {self._number}: the answers to turns {wrong} are wrong"
        assert not damaged, f"life {self._number}: bytes do not match their checksums"

    def runs(self, seconds: float) -> None:
        """Let it answer for some time."""
        end = time.monotonic() + seconds
        while self._results.poll(max(0.0, end - time.monotonic())):
            self.answers()

    def is_killed(self) -> None:
        """SIGKILL."""
        assert self._process.exitcode is None, f"life {self._number} has ended by itself"
        self._process.kill()
        self._process.join()
        with contextlib.suppress(EOFError, ConnectionResetError):
            self.runs(0.0)
        self._results.close()
        self._memory.unlink(missing_ok=True)


def test_every_answer_is_right_although_engines_are_killed_at_any_moment(llama: Path, tmp_path: Path) -> None:
    print(f"\nto repeat: make soak-tier KILLS={KILLS} SOAK_SEED={SEED}")
    known = References(llama, *((ids, TOKENS) for ids in TURNS))
    wanted = [known(ids, TOKENS) for ids in TURNS]
    # Processes are forked from one that has imported vLLM.
    context, chance, counts = fork_server(), random.Random(SEED), Counter[str]()
    for number in range(KILLS):
        life = Life(context, number, (llama, tmp_path / "cache", wanted), counts)
        if number % 10 == 9:
            # While it starts and recovers.
            time.sleep(chance.uniform(0.5, 4.0))
        else:
            life.answers()
            life.runs(chance.uniform(0.0, LIFE_S))
        life.is_killed()
        if number % 20 == 19:
            print(f"{number + 1} kills: {dict(counts)}", flush=True)
    print(f"{KILLS} kills: {counts['answers']} answers, all right, with {counts['cached']} tokens cached")
    last = Engine(llama, tier(tmp_path / "cache"), connector="OffloadingConnector", blocks=64)
    try:
        cached = 0
        for ids, tokens in zip(TURNS, wanted, strict=True):
            answer = last.generate(ids, TOKENS)
            assert answer.tokens == tokens
            cached += answer.cached
            settled(last)
        found = stats(last)
        print(f"the last engine: {cached} tokens cached, {found['disk_reads']} chunks from disk")
        assert found["disk_reads"] > 0
        assert found["checksum_failures"] == 0
    finally:
        last.close()
