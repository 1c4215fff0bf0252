"""Helpers of the tests of the connector in a real engine.

A process can hold only one engine with a connector at a time, so the tokens of a vLLM without any cache are generated
first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from real_engine import Engine, prompt

MEMORY = {"host_memory": "256MiB"}
BLOCK = 128
LONG = prompt(897)
"""Seven blocks and one token."""
OTHER = LONG[:700] + prompt(500, 3)
"""Shares five blocks with it."""
TOKENS = 16


class References:
    """The tokens of a vLLM without any cache, for prompts that were named beforehand."""

    def __init__(self, model: Path, *wanted: tuple[list[int], int]) -> None:
        self._known: dict[tuple[int, ...], list[int]] = {}
        plain = Engine(model, enable_prefix_caching=False)
        try:
            for length in sorted({n for _, n in wanted}):
                prompts = [ids for ids, n in wanted if n == length]
                for ids, answer in zip(prompts, plain.generate_all(prompts, length), strict=True):
                    self._known[tuple(ids)] = answer.tokens
        finally:
            plain.close()

    def __call__(self, ids: list[int], n: int = TOKENS) -> list[int]:
        tokens = self._known[tuple(ids)]
        assert len(tokens) >= n
        return tokens[:n]


def core(running: Engine) -> Any:
    """The engine of the tiers."""
    return running.connector._engine


def worker() -> Any:
    """The worker's half of the connector in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def settled(running: Engine, reset: bool = True) -> None:
    """Let the saves end, check that nothing is held, and empty the device's own cache."""
    running.idle_steps()
    assert running.device_blocks_in_use() == 0
    stats = core(running).stats()
    assert (stats["loads"], stats["saves"], stats["active_lookups"]) == (0, 0, 0)
    assert running.connector._scheduler.idle()
    if reset:
        assert running.reset_device_cache()
