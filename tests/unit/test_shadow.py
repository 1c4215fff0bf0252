"""The option `shadow`: hits of caches of other sizes are counted, and nothing else happens."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from undercroft import _core
from undercroft.config import UndercroftConfig
from undercroft.connector.observe import shadow
from undercroft.connector.observe.shadow import Shadow
from undercroft.connector.observe.stats import COUNTERS, GAUGES
from undercroft.metrics import SHADOWS
from undercroft.option_values import SHADOWS_MAX

BLOCK = 16
GROUPS = SimpleNamespace(
    hash_block_size=BLOCK, engine_block_size=BLOCK, hashes=lambda hashes: hashes, hits_whole_prompts=True
)


def request(prompt: int, blocks: int, tail: int = 1) -> Any:
    hashes = [bytes([prompt, block, 7, 9, 1, prompt, block, 3]) * 4 for block in range(blocks)]
    tokens = blocks * BLOCK + tail
    return SimpleNamespace(num_prompt_tokens=tokens, num_tokens=tokens, block_hashes=hashes)


def counted(requests: list[Any], *capacities: int) -> dict[str, Any]:
    """Each byte of a capacity is a token."""
    one = Shadow(capacities, GROUPS, lambda capacity: capacity)  # type: ignore[arg-type]
    for each in requests:
        one.finished(each)
    one.close()
    found = one.collect()
    assert one.collect() == {}
    return found


def test_a_larger_cache_would_have_had_more() -> None:
    # 40 prompts of 8 blocks, twice: 320 blocks. A cache of 64 blocks keeps few until they come again.
    prompts = [request(number, 8) for number in range(40)]
    found = counted(prompts * 2, 64 * BLOCK, 1000 * BLOCK)
    tokens = 8 * BLOCK + 1
    assert found["counters"].pop("shadow_hit_tokens_1", 0) < 8 * 8 * BLOCK
    assert found["counters"] == {
        "shadow_prompt_tokens": 2 * 40 * tokens,
        "shadow_hit_tokens_2": 40 * 8 * BLOCK,
    }
    assert found["gauges"] == {"shadow_capacity_bytes_1": 64 * BLOCK, "shadow_capacity_bytes_2": 1000 * BLOCK}
    assert set(found["counters"]) <= COUNTERS and set(found["gauges"]) <= GAUGES


@pytest.mark.parametrize(("whole", "blocks"), [(True, 4), (False, 3)])
def test_a_hit_ends_with_the_prompt_where_the_model_allows_it(
    whole: bool, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GROUPS, "hits_whole_prompts", whole)
    prompt = request(1, 4, tail=0)
    prompt.num_tokens += 1  # It has an answer of one token.
    found = counted([prompt, prompt], 1000 * BLOCK)
    assert found["counters"]["shadow_hit_tokens_1"] == blocks * BLOCK


def test_trouble_is_said_once_and_requests_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_blocks: int) -> None:
        raise RuntimeError("no index")

    monkeypatch.setattr(_core, "Replay", broken)
    with caplog.at_level(logging.ERROR, logger="vllm.undercroft"):
        assert counted([request(1, 4)] * 3, 1000) == {}
    assert len(caplog.records) == 1 and "no index" in caplog.text


def test_requests_over_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "PENDING_MAX", 0)
    assert counted([request(1, 4)], 1000) == {}


def test_sizes_come_as_one_or_several() -> None:
    assert UndercroftConfig.parse({"shadow": "1GiB"}, {}).shadow == (1 << 30,)
    assert UndercroftConfig.parse({"shadow": ["1GiB", "2TiB"]}, {}).shadow == (1 << 30, 2 << 40)
    assert UndercroftConfig.parse({}, {"UNDERCROFT_SHADOW": "1GiB,2GiB"}).shadow == (1 << 30, 2 << 30)
    assert UndercroftConfig.parse({}, {}).shadow == ()
    assert len(SHADOWS) == SHADOWS_MAX
