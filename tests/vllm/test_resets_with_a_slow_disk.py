"""Resets while a prompt is read from a disk that is slow or hangs: vLLM answers at once, as without undercroft."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_engine import LONG, OTHER, TOKENS, References, core
from engine_checks import add, finish, inject_faults, nothing_left, stats, step
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
RUNNING = prompt(300, seed=5)
PROMPTS = {"running": RUNNING, "loaded": LONG, "other": OTHER}
BOUND_S = 10.0
"""For calls that take milliseconds in vLLM alone, on a busy machine. The disk needs longer, or for ever."""


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, *((ids, TOKENS) for ids in PROMPTS.values()))


def options(tmp_path: Path) -> dict[str, Any]:
    return {"host_memory": "64MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB"}


@pytest.fixture
def one(engine: Make, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that has two prompts on disk only."""
    inject_faults(monkeypatch)
    before = engine(llama, options(tmp_path))
    for ids in (LONG, OTHER):
        before.generate(ids, 1)
        nothing_left(before)
    before.close()
    return engine(llama, options(tmp_path))


def reset(one: Engine) -> Any:
    return one.core.reset_prefix_cache(True, False)


def reset_both(one: Engine) -> Any:
    return one.core.reset_prefix_cache(True, True)


def pause(one: Engine) -> Any:
    returned = one.core.pause_scheduler("abort", True)
    one.core.resume_scheduler()
    return returned


def sleep(one: Engine) -> Any:
    returned = one.core.sleep(1), one.core.wake_up()
    return returned, one.core.is_scheduler_paused()


def returned(one: Engine, call: Callable[[Engine], Any], *aborted: str) -> Any:
    """What a call returns while one prompt is computed, and two others are read from disk where there is one."""
    for name, ids in PROMPTS.items():
        add(one, name, ids, TOKENS)
    step(one)
    if one.connector is not None:
        # The first pass looks up both. A disk that hangs is given up after a while, which is not what is tested.
        assert (stats(one)["active_lookups"], stats(one)["loads"]) == (2, 0)
    one.llm.llm_engine.abort_request(list(aborted))
    began = time.monotonic()
    answer = call(one)
    assert time.monotonic() - began < BOUND_S
    return answer


@pytest.mark.parametrize("rate", [0.0, 3e5], ids=["hangs", "slow"])
@pytest.mark.parametrize("call", [reset, reset_both, pause, sleep])
def test_a_call_waits_for_no_read(
    engine: Make, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: References,
    one: Engine, call: Callable[[Engine], Any], rate: float,
) -> None:  # fmt: skip
    ends = call in (pause, sleep)
    assert core(one).limit_reads(rate)
    answer = returned(one, call, *(PROMPTS if ends else ()))
    assert not (ends and stats(one)["active_lookups"])
    assert stats(one)["loads"] == 0
    assert rate or not stats(one)["disk_reads"]
    assert core(one).limit_reads(None)
    found = finish(one)
    assert found == ({} if ends else {name: reference(ids) for name, ids in PROMPTS.items()})
    nothing_left(one)
    for ids in (LONG, OTHER):
        assert one.generate(ids, TOKENS).tokens == reference(ids)
        nothing_left(one)
    counts = stats(one)
    assert (counts["load_failures"], counts["save_failures"], counts["checksum_failures"]) == (0, 0, 0)
    one.close()
    alone = engine(llama, None)
    assert returned(alone, call, *(PROMPTS if ends else ())) == answer
