"""Helpers of the tests of hybrid models in real engines."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector_engine import core, settled
from real_engine import Engine, Generation, prompt
from undercroft.connector.groups import GroupRegistration

HOST = "64MiB"
TOKENS = 16
BEST = 5
"""Tokens whose log probabilities are compared at each step."""
MODELS = {"gemma2": ("float32", 128, 0), "qwen3_next": ("bfloat16", 640, 0)}
"""Fixture of each model -> the rest of its `Model`."""


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
        """Whether two answers are the same up to rounding: tokens, and the log probabilities of the best at each.

        Where the two best tokens are as good as each other, rounding decides, and later tokens cannot be compared.
        """
        # Logits in bfloat16 go by steps of 1/16 from 8 to 16.
        tolerance = 0.1 if self.dtype == "bfloat16" else 1e-3
        for a, b, mine, theirs in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
            if a not in theirs or b not in mine:
                return False
            if any(abs(mine[token] - theirs[token]) > tolerance for token in mine.keys() & theirs.keys()):
                return False
            if a != b:
                return max(mine[a] - mine[b], theirs[b] - theirs[a]) <= tolerance
        return True

    def start(self, options: Mapping[str, Any] | None = None, **arguments: Any) -> Engine:
        """An engine of it, with undercroft unless ``options`` is None."""
        settings: dict[str, Any] = {"dtype": self.dtype, "max_model_len": 4096, "blocks": 96, **arguments}
        return Engine(self.directory, options, **settings)

    def ids(self, blocks: int, extra: int = 1, seed: int = 0) -> list[int]:
        """A prompt of so many blocks and ``extra`` tokens; one of fewer blocks and the same seed is its prefix."""
        return prompt(blocks * self.block + extra, seed)


def ask(running: Engine, ids: list[int], n: int = TOKENS, reset: bool = True) -> Generation:
    """Generate, and let all copies end; ``reset``: empty the device's own cache afterwards."""
    answer = running.generate(ids, n, logprobs=BEST)
    settled(running, reset)
    return answer


class Crowd:
    """Evicts all idle blocks from host memory, as another model's saves would; their copies on disk stay."""

    SIZE = 1 << 18

    def __init__(self, running: Engine) -> None:
        self._engine = core(running)
        self._session = self._engine.register("crowd", [GroupRegistration("full", 16, self.SIZE, 0)], 16)
        self._count = 0

    def push(self) -> None:
        """Write all blocks in host memory to disk, then fill host memory with others."""
        assert self._engine.flush(30.0)
        # Half as much again: earlier blocks may lie in pages of other sizes, which are emptied in steps.
        self.save(3 * self._engine.stats()["host_capacity_bytes"] // self.SIZE // 2)

    def save(self, count: int) -> None:
        """Save so many payloads, each the newest of all."""
        for number in range(count):
            self._count += 1
            hashes = [struct.pack("<Q24x", self._count)]
            assert self._session.lookup("crowd", hashes).tokens == 0
            grant = self._session.begin_save("crowd", hashes, 16)
            assert grant.extents
            self._session.end_transfer(grant.transfer_id, True)
            self._session.finish_request("crowd")
            if number % 32 == 31 or number == count - 1:
                assert self._engine.flush(30.0)

    def leave(self) -> None:
        """Give all memory back."""
        assert self._session.reset()
