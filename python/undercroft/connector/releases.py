"""The schemes that releases of vLLM stand for in the description, without an import of vLLM."""

from __future__ import annotations

from typing import NamedTuple

FORMAT = 2
"""Version of the description. Raise it when a change makes older caches unusable."""


class Schemes(NamedTuple):
    """Numbers of our own: releases with the same number do the same."""

    block_hash: int | str
    """The inputs of a block's hash, and their form. `tests/unit/test_schemes.py` has a sample of each."""
    page: int | str
    """How backends that pack nothing lay out a page of unquantized keys and values."""


RELEASES = {
    "0.31": Schemes(block_hash=1, page=2),
    "0.32": Schemes(block_hash=1, page=2),
    "0.33": Schemes(block_hash=1, page=2),
}
"""Releases of vLLM that were read for this, and on which `tests/unit/test_schemes.py` ran."""


def release_of(version: str) -> str:
    """Major and minor version: "0.32" of "0.32.0"."""
    return ".".join(version.split(".")[:2])
