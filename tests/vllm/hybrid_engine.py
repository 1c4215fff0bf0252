"""What the tests of hybrid models in real engines share."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector_engine import core, settled
from harness import Engine, Generation, prompt

HOST = "64MiB"
TOKENS = 16


@dataclass(frozen=True)
class Model:
    """A hybrid model and the sizes that its tests go by."""

    name: str
    directory: Path
    dtype: str
    block: int
    """Tokens of a block, the same for all groups."""
    optional_group: int
    """The group that is not full attention."""

    def same(self, one: Generation, other: Generation) -> bool:
        """Whether two answers have the same tokens, with the same log probabilities up to rounding."""
        tolerance = 0.05 if self.dtype == "bfloat16" else 1e-3
        return one.tokens == other.tokens and all(
            abs(a[token] - b[token]) <= tolerance
            for token, a, b in zip(one.tokens, one.logprobs, other.logprobs, strict=True)
        )

    def start(self, options: Mapping[str, Any] | None = None, **arguments: Any) -> Engine:
        """An engine of it, with undercroft unless ``options`` is None."""
        settings: dict[str, Any] = {"dtype": self.dtype, "max_model_len": 4096, "blocks": 96, **arguments}
        return Engine(self.directory, options, **settings)

    def ids(self, blocks: int, extra: int = 1, seed: int = 0) -> list[int]:
        """A prompt of so many blocks and ``extra`` tokens; one of fewer blocks and the same seed is its prefix."""
        return prompt(blocks * self.block + extra, seed)


def ask(running: Engine, ids: list[int], n: int = TOKENS, reset: bool = True) -> Generation:
    """Generate, and let all copies end; ``reset``: empty the device's own cache afterwards."""
    answer = running.generate(ids, n, logprobs=1)
    settled(running, reset)
    return answer


class Crowd:
    """Drives all that is idle out of host memory, as another model's saves would: what stays is on disk."""

    SIZE = 1 << 18

    def __init__(self, running: Engine) -> None:
        self._engine = core(running)
        self._session = self._engine.register("crowd", [("full", 16, self.SIZE, 0)], 16)
        self._count = 0

    def push(self) -> None:
        """Fill host memory, and write what was in it to disk before."""
        assert self._engine.flush(30.0)
        # Half as much again: what was there may lie in slots of other sizes.
        for _ in range(3 * self._engine.stats()["host_capacity_bytes"] // self.SIZE // 2):
            self._count += 1
            hashes = [struct.pack("<Q24x", self._count)]
            assert self._session.poll("crowd", hashes, 0) == 0
            job = self._session.begin_save("crowd", hashes, 16)
            assert job is not None
            self._session.end_save(job[0], True)
            self._session.discard("crowd")
            assert self._engine.flush(30.0)
