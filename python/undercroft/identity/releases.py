"""The schemes by which the description names releases of vLLM. Imports nothing of vLLM."""

from __future__ import annotations

from typing import NamedTuple

FORMAT = 2
"""Version of the description. Raise it when a change makes older caches unusable."""


class Schemes(NamedTuple):
    """undercroft's numbers of vLLM's schemes: releases with equal numbers have the same scheme."""

    block_hash: int | str
    """The inputs of a block's hash, and their form. `tests/unit/test_schemes.py` has a sample of each scheme."""
    page: int | str
    """The layout of a page of unquantized keys and values, with attention backends that pack nothing."""


RELEASES = {
    "0.31": Schemes(block_hash=1, page=2),
    "0.32": Schemes(block_hash=1, page=2),
    "0.33": Schemes(block_hash=1, page=2),
}
"""The schemes of the releases of vLLM whose source was read and on which `tests/unit/test_schemes.py` ran."""


def release_of(version: str) -> str:
    """Major and minor version: "0.32" of "0.32.0"."""
    return ".".join(version.split(".")[:2])
