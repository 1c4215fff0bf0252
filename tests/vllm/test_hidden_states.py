"""A model with a layer of hidden states, which vLLM hides from the scheduler in a group of full attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_checks import Reference, worker
from real_engine import Engine, prompt
from undercroft.connector import groups

pytestmark = pytest.mark.vllm

MEMORY = {"host_memory": "64MiB"}
SPECULATIVE = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
}
BLOCKS = 12


@pytest.mark.parametrize("declines", ["both", "worker"])
def test_vllm_serves_without_undercroft(
    declines: str, engine: Callable[..., Engine], llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only the worker's half sees the layer: saves that nobody ends would soon hold all device blocks."""
    if declines == "worker":
        monkeypatch.setattr(groups, "_why_not_deployed_so", lambda _: None)
    one = engine(llama, MEMORY, blocks=BLOCKS, max_model_len=1024, speculative_config=SPECULATIVE)
    (group,) = one.scheduler.kv_cache_config.kv_cache_groups
    assert len(group.layer_names) == 5
    assert (one.connector._scheduler is None) == (declines == "both")
    assert worker() is not None
    for seed in range(6):
        ids = prompt(500, seed)
        answer = one.generate(ids, 4)
        assert (answer.cached, answer.tokens) == (0, reference(ids, 4))
        one.idle_steps(1000)
        assert one.device_blocks_in_use() == 0
    assert one.reset_device_cache()
    assert one.generate(prompt(500), 4).cached == 0, "nothing was saved"
