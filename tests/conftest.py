"""Set before any test file imports torch, whose OpenMP reads it once: how a sum is split among threads rounds it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from real_engine import set_environment

set_environment()
# A shell ignores this signal in what it starts in the background, and each child would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


FAILED = pytest.StashKey[bool]()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """As pytest's, with a name of a few letters: a socket's path has at most 107 bytes, and pytest's own name, which
    repeats the test's, takes most of them. The directory stays only if the test fails."""
    directory = tmp_path_factory.mktemp("t")
    yield directory
    if not request.node.stash.get(FAILED, False):
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def least_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines evict the blocks used longest ago, so that other prompts turn a tier over.

    The learned order keeps prompts that come back, and does not admit what nobody asks for again.
    """
    monkeypatch.setenv("UNDERCROFT_LEAST_RECENT", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest first: with several workers, none is left with such a file at the end."""
    markers = ("server", "vllm")
    items.sort(key=lambda item: next((rank for rank, one in enumerate(markers) if item.get_closest_marker(one)), 2))
