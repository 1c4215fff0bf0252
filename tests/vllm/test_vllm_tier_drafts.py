"""Speculative decoding beside undercroft as a tier of vLLM's offloading: the draft's layers come back with the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from hybrid_engine import BEST, TOKENS, Model
from real_engine import Engine, prompt
from test_speculative_decoding import BLOCK, DRAFTS
from tier_engine import OFFLOADING, extra_config, settled, stats
from tiny_models import MODELS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MODEL = Model("", Path(), "float32", BLOCK, 0)
Start = Callable[[str, dict[str, Any]], Engine]


@pytest.fixture
def start(model_root: Path) -> Iterator[Start]:
    """Makes engines by how drafts are made and the connector's options, and closes them when the test ends."""
    started: list[Engine] = []

    def make(method: str, options: dict[str, Any]) -> Engine:
        draft = DRAFTS[method]
        target, drafter = (MODELS[name](model_root / name) for name in (draft.target, draft.model))
        speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": draft.tokens}
        one = Engine(target, options, max_model_len=2048, blocks=96, speculative_config=speculative, **OFFLOADING)
        started.append(one)
        return one

    yield make
    for one in reversed(started):
        one.close()


@pytest.mark.parametrize("method", ["mtp"])
def test_the_drafts_layers_come_back_after_a_restart(method: str, start: Start, tmp_path: Path) -> None:
    options = extra_config(tmp_path / "cache", cpu_bytes_to_use=64 << 20)
    first = start(method, options)
    # vLLM 0.33 has hashes that cover the next token, so that a prompt's last block has none. Its offloading wants a key
    # of each whole chunk.
    assert getattr(first.core.vllm_config, "num_hash_lookahead_tokens", 0) == 0
    cold = first.generate(MODEL.ids(4), TOKENS, logprobs=BEST)
    assert cold.cached == 0
    settled(first)
    turn = MODEL.ids(4) + cold.tokens + prompt(2 * BLOCK, seed=5)
    prompts = {"turn": turn, "whole": MODEL.ids(5, extra=0, seed=3), "a token more": MODEL.ids(5, seed=4)}
    whole, warm, again = {}, {}, {}
    for name, ids in prompts.items():
        whole[name] = first.generate(ids, TOKENS, logprobs=BEST)
        settled(first)
        warm[name] = first.generate(ids, TOKENS, logprobs=BEST)
        assert MODEL.same(warm[name], whole[name])
        settled(first)
    first.close()
    second = start(method, options)
    for name, ids in prompts.items():
        again[name] = second.generate(ids, TOKENS, logprobs=BEST)
        assert MODEL.same(again[name], whole[name])
        settled(second)
    # vLLM leaves out the draft's last chunk, so that its hit ends a chunk earlier. Of a window it keeps the chunks that
    # end with the prompt's last whole chunk, or a chunk earlier if the prompt ends there: only then has it the window
    # of its own hit. The tier's hit ends a chunk later, where it has none.
    assert {name: one.cached // BLOCK for name, one in warm.items()} == {"turn": 5, "whole": 4, "a token more": 0}
    assert {name: one.cached // BLOCK for name, one in again.items()} == {"turn": 5, "whole": 0, "a token more": 0}
    assert stats(second)["disk_reads"] > 0
    assert stats(second)["checksum_failures"] == stats(second)["load_failures"] == 0


@pytest.mark.skipif(not hasattr(VllmConfig, "num_hash_lookahead_tokens"), reason="vLLM has no such hashes before 0.33")
def test_vllms_own_offloading_fails_with_lookahead_hashes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason why they stay off beside the tier. When this test fails, `keep_lookahead_hashes` may leave them on."""
    one_ahead = property(lambda of: of.num_prefill_lookahead_tokens)
    monkeypatch.setattr(VllmConfig, "num_hash_lookahead_tokens", one_ahead)
    own = {"spec_name": "CpuOffloadingSpec", "spec_module_path": "cpu_tier_spec", "cpu_bytes_to_use": 64 << 20}
    one = start("mtp", own)
    assert one.core.vllm_config.num_hash_lookahead_tokens == 1
    one.generate(MODEL.ids(4), 1)
    # The hash of the last block would need the next token.
    with pytest.raises(AssertionError) as failed:
        one.generate(MODEL.ids(5, extra=0, seed=3), 1)
    assert "offloading" in str(failed.traceback[-1].path)
