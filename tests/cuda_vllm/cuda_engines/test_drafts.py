"""Speculative decoding: the draft's layers have blocks, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import fake_device
from engine_checks import Reference, nothing_left, stats
from fake_cuda import Fake
from prompts import MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine
from tiny_models import Shape, make_eagle, make_llama, make_mtp

Make = Callable[..., Engine]
SHAPE = Shape(hidden=128, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=32)
DRAFTS = {"eagle": make_eagle, "mtp": make_mtp}
HITS = [176, 224, 160, 0]
"""vLLM hits a block less, since the draft's KV of a token depends on the next one."""


@pytest.fixture(scope="module")
def target(model_root: Path) -> Path:
    return make_llama(model_root / "target", SHAPE)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    plain = Reference(target, **fake_device.ENGINE)
    found = [plain(ids, TOKENS) for ids in PROMPTS]
    plain.close()
    return found


@pytest.mark.parametrize("method", DRAFTS)
def test_a_drafts_layers_come_back(
    method: str, fake: Fake, engine: Make, target: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    model = DRAFTS[method](tmp_path / method, replace(SHAPE, layers=1))
    draft = {"method": method, "model": str(model), "num_speculative_tokens": 1}
    # MiMo's draft looks for the number of its layers in the target's configuration.
    one = engine(target, MEMORY, speculative_config=draft, hf_overrides={"num_nextn_predict_layers": 1})
    [group] = one.scheduler.kv_cache_config.kv_cache_groups
    assert len(group.layer_names) == 3
    slow(fake)
    assert tokens(one.generate_all(PROMPTS, TOKENS)) == expected
    nothing_left(one)
    hit = one.generate_all(PROMPTS, TOKENS)
    assert (tokens(hit), cached(hit)) == (expected, HITS)
    nothing_left(one)
    assert stats(one)["load_failures"] == 0
