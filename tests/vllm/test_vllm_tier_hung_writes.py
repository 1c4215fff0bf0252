"""undercroft as a tier of vLLM's offloading while a disk's writes hang: no prompt, abort or reset waits for them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from connector_engine import LONG, TOKENS, References
from engine_checks import add, begun, step_until
from full_filesystem import freezable, frozen
from real_engine import Engine, prompt
from tier_engine import OFFLOADING, Make, extra_config, health, hits, stats, tier_of
from undercroft.log import logger

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CROWD = [prompt(897, seed=70 + number) for number in range(15)]
"""Of seven chunks each: more than undercroft's memory holds, and vLLM's."""
KEPT = CROWD[:3]


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, *((ids, TOKENS) for ids in (LONG, *CROWD)))


def started(engine: Make, model: Path, filesystem: Path) -> Engine:
    """With room for 64 chunks in undercroft's memory, and for 16 in vLLM's."""
    options = extra_config(filesystem / "cache", rows=16, disk_capacity="64MiB", host_memory="32MiB")
    return engine(model, options, **OFFLOADING)


def seconds(one: Engine, reference: References, ids: list[int], *cached: int) -> float:
    """The time of a prompt's right answer, with one of these numbers of tokens from a cache. Saves may still wait
    afterwards."""
    began = time.monotonic()
    answer = one.generate(ids, TOKENS)
    took = time.monotonic() - began
    assert answer.tokens == reference(ids)
    assert answer.cached in cached
    while one.device_blocks_in_use():
        one.core.step_fn()
    assert one.reset_device_cache()
    return took


def test_no_request_waits_for_writes_that_hang(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    with freezable(tmp_path / "filesystem") as filesystem:
        one = started(engine, llama, filesystem)
        began = time.monotonic()
        for ids in KEPT:
            hits(one, reference, ids, 0)
        usual = time.monotonic() - began
        with frozen(filesystem):
            took = [seconds(one, reference, ids, 0) for ids in CROWD[3:]]
            # A directory in which nothing has ended for a second is not read, either.
            took += [seconds(one, reference, ids, 0, 896) for ids in KEPT]
            assert health(one) == "stalled"
        assert max(took) < 2 + usual, took
        hits(one, reference, LONG, 0)
        one.close()
        second = started(engine, llama, filesystem)
        # The chunks saved before the writes hung, and afterwards.
        for ids in (*KEPT, LONG):
            hits(second, reference, ids, 896)
        for ids in CROWD[3:]:
            assert second.generate(ids, TOKENS).tokens == reference(ids)
        assert stats(second)["checksum_failures"] == stats(second)["load_failures"] == 0
        second.close()


def test_writes_that_hang_hold_up_no_end(
    engine: Make,
    llama: Path,
    reference: References,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    with freezable(tmp_path / "filesystem") as filesystem:
        one = started(engine, llama, filesystem)
        for ids in KEPT:
            hits(one, reference, ids, 0)
        with frozen(filesystem):
            for ids in CROWD[3:6]:
                seconds(one, reference, ids, 0)
            began = time.monotonic()
            one.close()
            took = time.monotonic() - began
        lost = next(line for line in caplog.messages if "before its disks had taken all blocks" in line)
        assert re.search(r"(MiB that waited|[1-9]\d* operations that had begun)", lost), lost
        # For pending writes, for a disk that answers, and for the hourly sums.
        assert took < 10 + 5 + 2 + 5, took
        second = started(engine, llama, filesystem)
        for ids in KEPT:
            hits(second, reference, ids, 896)
        for ids in CROWD[3:6]:
            assert second.generate(ids, TOKENS).tokens == reference(ids)
        assert stats(second)["checksum_failures"] == stats(second)["load_failures"] == 0
        second.close()


def test_a_frozen_directory_holds_up_the_start_for_a_limited_time(
    engine: Make,
    llama: Path,
    reference: References,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    with freezable(tmp_path / "filesystem") as filesystem:
        one = started(engine, llama, filesystem)
        hits(one, reference, LONG, 0)
        one.close()
        with frozen(filesystem):
            one = started(engine, llama, filesystem)
            assert health(one) == "unavailable"
        assert f"the filesystem of disk_path {filesystem / 'cache'}" in caplog.text
        assert "has not answered for 30 s" in caplog.text
        answer = one.generate(LONG, TOKENS)
        assert (answer.cached, answer.tokens) == (0, reference(LONG))
        # Half a minute after the start the directory is tried again, and is empty then.
        kept = 896 if health(one) == "unavailable" else 0
        one.close()
        second = started(engine, llama, filesystem)
        assert second.generate(LONG, TOKENS).cached == kept
        second.close()


def test_writes_that_hang_hold_up_neither_aborts_nor_resets(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    with freezable(tmp_path / "filesystem") as filesystem:
        one = started(engine, llama, filesystem)
        hits(one, reference, LONG, 0)
        with frozen(filesystem):
            for ids in CROWD[:6]:
                seconds(one, reference, ids, 0)
            began = time.monotonic()
            add(one, "aborted", CROWD[6], TOKENS)
            step_until(one, lambda: begun(one))
            one.llm.llm_engine.abort_request(["aborted"])
            tier_of(one).drain_jobs()
            assert one.reset_device_cache(connector=True)
            answer = one.generate(LONG, TOKENS)
            took = time.monotonic() - began
            assert (answer.cached, answer.tokens) == (0, reference(LONG))
        assert took < 20
        one.close()
        second = started(engine, llama, filesystem)
        for ids in (LONG, *CROWD[:6]):
            assert second.generate(ids, TOKENS).tokens == reference(ids)
        assert stats(second)["checksum_failures"] == stats(second)["load_failures"] == 0
        second.close()
