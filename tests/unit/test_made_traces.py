"""The traces that `benches/traces/generate.py` makes."""

from __future__ import annotations

import itertools

import pytest
from traces import generate


@pytest.mark.parametrize("kind", generate.KINDS)
def test_a_trace_is_a_forest_in_order_of_arrival(kind: str) -> None:
    requests = list(generate.trace(kind, seed=3, seconds=120))
    assert requests == list(generate.trace(kind, seed=3, seconds=120))
    assert requests != list(generate.trace(kind, seed=4, seconds=120))
    times = [time for time, _, _ in requests]
    assert times == sorted(times)
    parents: dict[int, int] = {}
    for _, blocks, tokens in requests:
        assert len(blocks) == tokens // generate.BLOCK_TOKENS
        for parent, block in itertools.pairwise([-1, *blocks]):
            assert parents.setdefault(block, parent) == parent


def test_most_pauses_for_tools_are_short() -> None:
    draw = generate.Draw(1, 0)
    pauses = [draw.tool_pause() for _ in range(20_000)]
    assert sum(pause <= 1 for pause in pauses) / len(pauses) == pytest.approx(0.86, abs=0.01)
    assert sum(pause <= 10 for pause in pauses) / len(pauses) == pytest.approx(0.95, abs=0.01)
