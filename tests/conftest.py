"""Set before any test file imports torch, whose OpenMP reads it once: how a sum is split among threads rounds it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_engine import set_environment

set_environment()


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory with a short name: a socket's path has at most 107 bytes, and `tmp_path` may take most of them."""
    with tempfile.TemporaryDirectory(prefix="uc") as directory:
        yield Path(directory)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest first: with several workers, none is left with such a file at the end."""
    markers = ("server", "vllm")
    items.sort(key=lambda item: next((rank for rank, one in enumerate(markers) if item.get_closest_marker(one)), 2))
