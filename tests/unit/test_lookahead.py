"""Lookahead hashes stay on beside undercroft, and only where the tiers can use them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import config

from undercroft import registration, vllm_patches
from undercroft.vllm_patches import table
from undercroft.vllm_patches.table import LOOKAHEAD_HASHES

OURS = SimpleNamespace(kv_connector="UndercroftConnector")


class VllmConfig:
    """The parts of vLLM 0.33's configuration that decide."""

    def __init__(self, connector: Any, tokens: int = 1, *, states: bool = False) -> None:
        self.kv_transfer_config, self.tokens = connector, tokens
        self.model_config = SimpleNamespace(has_inner_state=states)

    @property
    def num_hash_lookahead_tokens(self) -> int:
        """Tokens after each block that its hash covers."""
        return 0 if self.kv_transfer_config is not None else self.num_prefill_lookahead_tokens

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        return self.tokens


@pytest.fixture
def lift(monkeypatch: pytest.MonkeyPatch) -> Callable[[], type]:
    """Applies the patch to a fresh class."""

    def apply() -> type:
        fresh: Any = type("VllmConfig", (VllmConfig,), dict(vars(VllmConfig)))
        monkeypatch.setattr(config, "VllmConfig", fresh)
        for _ in range(2):
            assert vllm_patches.keep_lookahead_hashes(registration.is_ours)
        return fresh

    return apply


def test_the_hashes_are_those_of_vllm_alone(lift: Callable[[], type]) -> None:
    made = lift()
    for tokens in (0, 1, 3):
        assert made(OURS, tokens).num_hash_lookahead_tokens == made(None, tokens).num_hash_lookahead_tokens == tokens


@pytest.mark.parametrize(
    ("connector", "states"),
    [
        (SimpleNamespace(kv_connector="MultiConnector"), False),
        (SimpleNamespace(kv_connector="OffloadingConnector"), False),
        (SimpleNamespace(kv_connector=None), False),
        (OURS, True),
    ],
)
def test_other_connectors_and_models_with_states_keep_vllms_choice(
    lift: Callable[[], type], connector: Any, states: bool
) -> None:
    assert lift()(connector, states=states).num_hash_lookahead_tokens == 0


def test_an_error_of_ours_leaves_vllms_choice(lift: Callable[[], type], monkeypatch: pytest.MonkeyPatch) -> None:
    made = lift()
    monkeypatch.setattr(table, "_problems", {})
    assert made(object()).num_hash_lookahead_tokens == 0
    assert "has other internals" in str(vllm_patches.problem(LOOKAHEAD_HASHES))


def test_a_vllm_without_such_hashes_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    older = type("VllmConfig", (), {})
    monkeypatch.setattr(config, "VllmConfig", older)
    assert vllm_patches.keep_lookahead_hashes(registration.is_ours)
    assert not hasattr(older, "num_hash_lookahead_tokens")
