"""undercroft as a tier of vLLM's offloading on a filesystem that is full: the same tokens, and no error of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector_engine import LONG, OTHER, TOKENS, References
from full_filesystem import small, take_space
from real_engine import Engine, prompt
from tier_engine import OFFLOADING, Make, extra_config, health, hits, settled, stats, until_no_writes

APART = prompt(897, seed=90)
"""Shares no chunk with `LONG`."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS), (OTHER, TOKENS), (APART, TOKENS))


@pytest.fixture
def filesystem(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 96 MiB."""
    with small(tmp_path / "filesystem") as place:
        yield place


@pytest.fixture(autouse=True)
def no_error_of_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """vLLM itself reports no error."""
    vllm = logging.getLogger("vllm")
    vllm.addHandler(caplog.handler)
    yield
    vllm.removeHandler(caplog.handler)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors if not record.name.startswith("vllm.undercroft")] == []


def answers(one: Engine, reference: References, ids: list[int], cached: int) -> None:
    """A prompt's answer is right, with so many tokens from a cache."""
    answer = one.generate(ids, TOKENS)
    assert (answer.cached, answer.tokens) == (cached, reference(ids))
    settled(one, writes=False)


def test_a_filesystem_that_fills_up_costs_saves_only(
    engine: Make, llama: Path, reference: References, filesystem: Path
) -> None:
    options = extra_config(filesystem / "cache", rows=8, disk_capacity="64MiB")
    one = engine(llama, options, **OFFLOADING)
    hits(one, reference, LONG, 0)
    take_space(filesystem)
    answers(one, reference, APART, 0)
    until_no_writes(one)
    # Undercroft's memory has both prompts, and vLLM's has one.
    answers(one, reference, LONG, 896)
    answers(one, reference, APART, 896)
    one.close()
    second = engine(llama, options, **OFFLOADING)
    answers(second, reference, LONG, 896)
    assert stats(second)["disk_reads"] == 7
    answers(second, reference, APART, 0)
    assert stats(second)["checksum_failures"] == stats(second)["load_failures"] == 0


def test_a_filesystem_that_is_full_from_the_start_costs_the_disk_only(
    engine: Make, llama: Path, reference: References, filesystem: Path
) -> None:
    take_space(filesystem)
    options = extra_config(filesystem / "cache", rows=8, disk_capacity="64MiB")
    one = engine(llama, options, **OFFLOADING)
    assert health(one) == "unavailable"
    for cached in (0, 896):
        hits(one, reference, LONG, cached)
        hits(one, reference, APART, cached)
