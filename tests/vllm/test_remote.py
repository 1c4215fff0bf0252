"""Two vLLM engines that share nothing but a remote store: one hits what the other computed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bad_network import Proxy, redis_server
from connector_engine import TOKENS, References, core, settled
from real_engine import Engine, prompt
from undercroft.log import logger

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
PROMPT = prompt(1025, seed=41)
"""Eight blocks and one token: whole segments."""
ABSENT = prompt(1025, seed=42)
PATIENCE_S = 60.0
HIT_TOKENS, BY_SOURCE = "vllm:undercroft_hit_tokens", "vllm:prompt_tokens_cached_by_source"


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (PROMPT, TOKENS), (ABSENT, TOKENS))


def options(tmp_path: Path, name: str, **others: Any) -> dict[str, Any]:
    """A host with a disk of its own."""
    return {
        "host_memory": "64MiB",
        "disk_path": str(tmp_path / name),
        "disk_capacity": "128MiB",
        "remote": f"file://{tmp_path}/remote",
        "remote_object": "1MiB",
        "promotion_wait": "complete",
        **others,
    }


def until(running: Engine, is_so: Callable[[dict[str, float]], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so(stats := core(running).stats()):
        assert time.monotonic() < deadline, {name: stats[name] for name in stats if name.startswith("remote")}
        time.sleep(0.01)


def computed_by_another(make: Make, llama: Path, tmp_path: Path, reference: References) -> int:
    """The prompt, computed and written by an engine that has ended: how many objects there are."""
    first = make(llama, options(tmp_path, "first"))
    assert first.generate(PROMPT, TOKENS).tokens == reference(PROMPT)
    settled(first)
    until(first, lambda stats: stats["remote_put_queue_segments"] == 0 and stats["remote_puts"] > 0)
    puts = int(core(first).stats()["remote_puts"])
    first.close()
    return puts


def test_an_engine_hits_blocks_that_another_host_has_computed(
    engine: Make, llama: Path, tmp_path: Path, reference: References
) -> None:
    puts = computed_by_another(engine, llama, tmp_path, reference)
    second = engine(llama, options(tmp_path, "second"))
    warm = second.generate(PROMPT, TOKENS)
    assert (warm.cached, warm.tokens) == (1024, reference(PROMPT))
    settled(second)
    stats = core(second).stats()
    assert (stats["remote_gets"], stats["remote_hit_tokens"]) == (puts, 1024)
    by_tier = {one.labels["tier"]: one.value for one in second.llm.get_metrics() if one.name == HIT_TOKENS}
    assert by_tier == {"host": 0, "disk": 0, "remote": 1024}
    by_source = {one.labels["source"]: one.value for one in second.llm.get_metrics() if one.name == BY_SOURCE}
    assert (by_source["host"], by_source["disk"], by_source["external_unspecified"]) == (0, 0, 1024)
    cold = second.generate(ABSENT, TOKENS)
    assert (cold.cached, cold.tokens) == (0, reference(ABSENT))


def test_damaged_objects_are_computed_again(engine: Make, llama: Path, tmp_path: Path, reference: References) -> None:
    computed_by_another(engine, llama, tmp_path, reference)
    objects = [path for path in (tmp_path / "remote").rglob("*-*") if path.is_file()]
    assert objects
    for path in objects:
        content = bytearray(path.read_bytes())
        content[-5000] ^= 1
        path.write_bytes(content)
    second = engine(llama, options(tmp_path, "second"))
    answer = second.generate(PROMPT, TOKENS)
    assert (answer.cached < 1024, answer.tokens) == (True, reference(PROMPT))
    assert core(second).stats()["remote_corrupt"] > 0
    settled(second)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "file://{}/mount/remote"])
def test_vllm_starts_without_its_remote_store_and_says_why(
    engine: Make, llama: Path, tmp_path: Path, reference: References, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    # Nobody listens there, and no file system is mounted there.
    url = url.format(tmp_path)
    logger.addHandler(caplog.handler)
    try:
        running = engine(llama, options(tmp_path, "alone", remote=url))
        until(running, lambda stats: stats["remote_degraded"] == 1)
        deadline = time.monotonic() + PATIENCE_S
        while not any(f"remote {url} cannot be used" in line and "To do:" in line for line in caplog.messages):
            assert time.monotonic() < deadline, caplog.messages
            running.idle_steps()
    finally:
        logger.removeHandler(caplog.handler)
    for cached in (0, 1024):
        answer = running.generate(PROMPT, TOKENS)
        assert (answer.cached, answer.tokens) == (cached, reference(PROMPT))
        settled(running)
    assert core(running).info()["remote"]["health"] == "failed"


@pytest.mark.parametrize("fault", ["frozen", "slow", "killed", "damaged"])
def test_a_bad_store_costs_a_quarter_of_computing_at_most(
    engine: Make, llama: Path, tmp_path: Path, reference: References, fault: str
) -> None:
    """In processor time of vLLM's thread, which polls while it waits: other work on the machine does not count."""
    rounds, tokens = 4, 2049
    stored = [prompt(tokens, seed=50 + number) for number in range(rounds)]
    with redis_server() as port:
        writer = engine(llama, options(tmp_path, "first", remote=f"redis://127.0.0.1:{port}/0", host_memory="256MiB"))
        writer.generate_all([*stored, PROMPT], 1)
        settled(writer)
        until(writer, lambda stats: stats["remote_put_queue_segments"] == 0 and stats["remote_puts"] > 0)
        writer.close()
        proxy = Proxy(port)
        remote = f"redis://127.0.0.1:{proxy.port}/0"
        running = engine(llama, options(tmp_path, "second", remote=remote, promotion_wait="complete"))
        absent = (prompt(tokens, seed=number) for number in range(100, 1000))

        def cost(ids: list[int]) -> float:
            began = time.thread_time()
            running.generate(ids, 1, params={"promotion_wait": "planned"})
            took = time.thread_time() - began
            settled(running)
            return took

        # The planner learns how long steps take.
        learned = [cost(next(absent)) for _ in range(8)]
        computed, hung = [], []
        for ids in stored:
            computed += [cost(next(absent)) for _ in range(2)]
            match fault:
                case "frozen":
                    proxy.freeze()
                case "slow":
                    proxy.bytes_per_s = 100_000
                case "killed":
                    proxy.kill()
                case _:
                    proxy.damages = True
            hung += [cost(ids), cost(next(absent))]
            proxy.pass_on()
            # The store is tried again by itself.
            deadline = time.monotonic() + PATIENCE_S
            while core(running).stats()["remote_degraded"]:
                assert time.monotonic() < deadline
                cost(next(absent))
        print(f"{fault}: learned {learned}, computed {computed}, hung {hung}")
        assert statistics.median(hung) <= 1.25 * statistics.median(computed)
        # The first request after the fault is the one that waits.
        assert statistics.median(hung[::2]) <= 1.25 * statistics.median(computed)
        counted = {"killed": "remote_failures", "damaged": "remote_corrupt"}.get(fault)
        assert counted is None or core(running).stats()[counted] > 0
        # A prompt that is in the store is a hit again, with the tokens of a vLLM without any cache.
        warm = running.generate(PROMPT, TOKENS)
        assert (warm.cached, warm.tokens) == (1024, reference(PROMPT))
        settled(running)
        running.close()
        proxy.close()
