"""Speculative decoding beside undercroft as a tier of vLLM's offloading: the draft's layers come back with the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybrid_engine import BEST, TOKENS, Model
from real_engine import Engine, prompt
from test_speculative_decoding import BLOCK, DRAFTS
from tier_engine import OFFLOADING, extra_config, settled, stats
from tiny_models import MODELS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Start = Callable[[str, Path], Engine]


@pytest.fixture
def start(model_root: Path) -> Iterator[Start]:
    """Makes engines by the name of how drafts are made and a cache's directory, and closes them when the test ends."""
    started: list[Engine] = []

    def make(method: str, directory: Path) -> Engine:
        draft = DRAFTS[method]
        target, drafter = (MODELS[name](model_root / name) for name in (draft.target, draft.model))
        speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": draft.tokens}
        options = extra_config(directory, cpu_bytes_to_use=64 << 20)
        one = Engine(target, options, max_model_len=2048, blocks=96, speculative_config=speculative, **OFFLOADING)
        started.append(one)
        return one

    yield make
    for one in reversed(started):
        one.close()


@pytest.mark.parametrize("method", ["mtp"])
def test_the_drafts_layers_come_back_after_a_restart(method: str, start: Start, tmp_path: Path) -> None:
    model = Model("", Path(), "float32", BLOCK, 0)
    first = start(method, tmp_path / "cache")
    cold = first.generate(model.ids(4), TOKENS, logprobs=BEST)
    assert cold.cached == 0
    settled(first)
    turn = model.ids(4) + cold.tokens + prompt(2 * BLOCK, seed=5)
    whole = first.generate(turn, TOKENS, logprobs=BEST)
    settled(first)
    warm = first.generate(turn, TOKENS, logprobs=BEST)
    assert model.same(warm, whole)
    assert warm.cached >= 5 * BLOCK, "of vLLM's own host memory"
    settled(first)
    first.close()
    second = start(method, tmp_path / "cache")
    again = second.generate(turn, TOKENS, logprobs=BEST)
    assert model.same(again, whole)
    assert again.cached == warm.cached, "as many as vLLM's own host memory would bring"
    settled(second)
    assert stats(second)["disk_reads"] > 0
    assert stats(second)["checksum_failures"] == stats(second)["load_failures"] == 0
