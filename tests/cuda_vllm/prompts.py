"""Prompts of the engines on the fake CUDA, and how their device is slowed down."""

from __future__ import annotations

from collections.abc import Sequence

from fake_cuda import Fake
from real_engine import Generation, prompt

MEMORY = {"host_memory": "64MiB"}
TOKENS = 6
SHARED = prompt(200)
PROMPTS = [SHARED, prompt(240, seed=1), SHARED[:100] + prompt(90, seed=2), prompt(33, seed=3)]
CACHED = [192, 240, 176, 0]
"""Tokens of the prompts in whole blocks of 16, from `min_load_tokens` on."""


def slow(fake: Fake, seed: int = 0, bytes_per_second: float = 3e7) -> None:
    """Copies take their time, and all work begins late, by delays from a seed."""
    fake.copies_at(bytes_per_second)
    fake.delays(seed, 0.002)


def tokens(answers: Sequence[Generation]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cached(answers: Sequence[Generation]) -> list[int]:
    return [answer.cached for answer in answers]
