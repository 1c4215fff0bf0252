"""`undercroft size` computes the same from a model's config.json as the connector from vLLM's own KV cache groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from real_engine import Engine
from undercroft import capacity
from undercroft.connector.groups import GroupRegistration, Groups
from undercroft.model.groups import groups_of
from undercroft.model.layers import Precision, layers_of, read_config

pytestmark = pytest.mark.vllm

# vLLM's CPU platform keeps states in float32.
MODELS = {"llama": "float32", "gemma2": "float32", "llama4": "float32", "phi3": "bfloat16", "qwen3_next": "bfloat16"}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_as_large_as_the_connector_says(
    name: str, engine: Callable[..., Engine], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[list[GroupRegistration]] = []
    registration = Groups.registration

    def remember(self: Groups, payload_bytes: Any) -> list[GroupRegistration]:
        registered.append(registration(self, payload_bytes))
        return registered[-1]

    monkeypatch.setattr(Groups, "registration", remember)
    directory: Path = request.getfixturevalue(name)
    running = engine(directory, {"host_memory": "64MiB"}, dtype=MODELS[name], blocks=96)
    ((*theirs,),) = registered
    gauges = running.connector.get_kv_connector_stats().data["gauges"]
    assert gauges["host_capacity_tokens"] == capacity.tokens_in(64 << 20, theirs, 8192) > 0
    # 128: the block size of the CPU platform.
    layers = layers_of(read_config(str(directory)), Precision(MODELS[name], state="float32"))
    mine = groups_of(layers, 128)
    assert [(group.kind, group.block_tokens, group.payload_bytes, group.window_tokens) for group in mine] == [
        (group.kind, group.block_tokens, group.payload_bytes, group.window_tokens) for group in theirs
    ]
