"""vLLM and SGLang at the same time, on one directory and on one server: each finds what is its own, and nothing else.

SGLang's half, with its real pools, is a process of its own. Its wheel is fetched once (40 MB); without a network, and
without it, the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sglang_packages

from connector_engine import LONG, TOKENS, core
from real_engine import Engine
from serve_process import ServeProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SGLANG = Path(__file__).parents[1] / "sglang/hicache"
# For each line of the input: saves a prompt of 16 pages, and reads all prompts since the start. Says how many pages it
# read, and how many of them were wrong.
PROGRAM = """
import sys
import time
sys.path.insert(0, {folder!r})
from host_pools import after, fill, keys, mha, opened, wipe, wrong
pool, read, bad, prompts = mha(), 0, 0, 0
store = opened({disk!r}, pool, **{more!r})
print("ready", flush=True)
for line in sys.stdin:
    chain = keys(f"prompt {{prompts}}", 16)
    while not all(store.batch_set_v1(chain, fill(pool, range(16), chain), after())):
        time.sleep(0.01)
    while store.batch_exists(chain, after()) < 16:
        time.sleep(0.01)
    prompts += 1
    for number in range(prompts):
        chain = keys(f"prompt {{number}}", 16)
        got = store.batch_get_v1(chain, wipe(pool, range(16)), after())
        read, bad = read + sum(got), bad + len(wrong(pool, range(16), chain, got))
    print(read, bad, flush=True)
store.close()
"""
PATIENT = {"server_timeout_ms": 10_000, "lookup_spin_us": 100_000}
"""Two cores for all of this."""
Make = Callable[..., Engine]


@contextmanager
def sglang(disk: str, more: dict[str, Any]) -> Iterator[Callable[[], tuple[int, int]]]:
    """SGLang's process: a call saves and reads, and returns the pages read since the start, and the wrong ones."""
    try:
        packages = sglang_packages.unpacked()
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"SGLang {sglang_packages.VERSION} cannot be fetched: {error}")
    program = PROGRAM.format(folder=str(SGLANG), disk=disk, more=more)
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        lines = iter(child.stdout.readline, "")

        def turn() -> tuple[int, int]:
            assert child.stdin is not None
            print(file=child.stdin, flush=True)
            read, wrong = next(lines, "-1 -1").split()
            return int(read), int(wrong)

        try:
            assert any(line == "ready\n" for line in lines), "it did not start"
            yield turn
            child.stdin.close()
            assert child.wait(60) == 0
        finally:
            child.kill()


@contextmanager
def directory(tmp_path: Path) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """The options of vLLM, and SGLang's directory and further options."""
    options = {"host_memory": "64MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}
    yield options, options["disk_path"], {"host_memory": "64MiB"}


@contextmanager
def server(tmp_path: Path) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """As `directory`, with a server that both ask."""
    with ServeProcess(tmp_path / "s") as one:
        options = {"server": f"unix://{one.socket}"}
        yield options, "", options


def connected(running: Engine) -> Engine:
    """The engine, when its lookups reach the cache."""
    deadline = time.monotonic() + 60
    while core(running).connection()[0] != "up":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return running


def hits(running: Engine, expected: list[int]) -> None:
    """The prompt is found as soon as it is saved. A server may say so later."""
    deadline, cached = time.monotonic() + 60, 0
    while not cached:
        assert time.monotonic() < deadline
        running.idle_steps()
        assert running.reset_device_cache()
        answer = running.generate(LONG, TOKENS)
        assert answer.tokens == expected
        cached = answer.cached
    assert cached == 896


@pytest.mark.parametrize("place", [directory, server])
@pytest.mark.parametrize("is_first", [True, False], ids=["sglang_first", "vllm_first"])
def test_vllm_and_sglang_share_a_cache_and_never_meet(
    engine: Make, llama: Path, reference: Any, tmp_path: Path, place: Any, is_first: bool
) -> None:
    with place(tmp_path) as (options, disk, more):
        expected, of_vllm = reference(LONG, TOKENS), options | PATIENT
        running = None if is_first else connected(engine(llama, of_vllm))
        with sglang(disk, more) as turn:
            assert turn() == (16, 0)
            for start in range(2):
                running = running or connected(engine(llama, of_vllm))
                answer = running.generate(LONG, TOKENS)
                assert (answer.cached, answer.tokens) == (896 * start, expected)
                # SGLang's prompts of before, and one more.
                assert turn() == (16 * (3 + 3 * start), 0)
                hits(running, expected)
                running.close()
                running = None
            assert turn() == (16 * 10, 0)
