"""One real engine with the connector: requests of every shape, each leaving nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from connector_engine import MEMORY, TOKENS, References, settled, worker
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

LENGTHS = [1, 127, 128, 129, 255, 256, 257, 640]
PREFIX = prompt(512, seed=53)
FAMILY = [PREFIX + prompt(30 + i, seed=60 + i) for i in range(8)]
CHAT = prompt(200, seed=51)


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    first = References(llama, (CHAT, 200))
    turn = CHAT + first(CHAT, 200) + prompt(20, seed=52)
    wanted = [(prompt(length, seed=length), 4) for length in LENGTHS] + [(ids, 8) for ids in FAMILY]
    return References(llama, *wanted, (CHAT, 200), (turn, TOKENS))


@pytest.fixture(scope="module")
def running(llama: Path, reference: References) -> Iterator[Engine]:
    """The engine."""
    one = Engine(llama, MEMORY)
    yield one
    one.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_around_a_block(running: Engine, reference: References, length: int) -> None:
    ids = prompt(length, seed=length)
    cold = running.generate(ids, 4)
    settled(running)
    warm = running.generate(ids, 4)
    # One token is always computed: of a full hit, only the last one.
    assert (cold.cached, warm.cached) == (0, length // 128 * 128)
    assert cold.tokens == warm.tokens == reference(ids, 4)
    settled(running)


def test_one_token_requests_are_saved_too(running: Engine) -> None:
    ids = prompt(300, seed=50)
    assert len(running.generate(ids, 1).tokens) == 1
    settled(running)
    assert running.generate(ids, 1).cached == 256
    settled(running)


def test_generated_blocks_are_saved(running: Engine, reference: References) -> None:
    answer = running.generate(CHAT, 200).tokens
    assert answer == reference(CHAT, 200)
    settled(running)
    turn = CHAT + answer + prompt(20, seed=52)
    warm = running.generate(turn, TOKENS)
    # 200 + 199 tokens have their KV: three full blocks.
    assert (warm.cached, warm.tokens) == (384, reference(turn))
    settled(running)


def test_many_requests_of_one_prefix_at_once(running: Engine, reference: References) -> None:
    running.generate([*PREFIX, 5], 1)
    settled(running)
    warm = running.generate_all(FAMILY, 8)
    assert [answer.cached for answer in warm] == [512] * 8
    assert [answer.tokens for answer in warm] == [reference(ids, 8) for ids in FAMILY]
    settled(running)


def test_salted_requests_are_kept_apart(running: Engine) -> None:
    ids = prompt(400, seed=54)
    running.generate(ids, 1, cache_salt="one")
    settled(running)
    assert running.generate(ids, 1).cached == 0
    settled(running)
    assert running.generate(ids, 1, cache_salt="two").cached == 0
    settled(running)
    assert running.generate(ids, 1, cache_salt="one").cached == 384
    settled(running)


def test_reset_with_and_without_the_connector(running: Engine) -> None:
    ids = prompt(400, seed=55)
    running.generate(ids, 1)
    settled(running, reset=False)
    assert running.reset_device_cache()
    assert running.generate(ids, 1).cached == 384
    settled(running, reset=False)
    assert running.reset_device_cache(connector=True)
    assert running.generate(ids, 1).cached == 0
    settled(running)


def test_reset_while_saves_are_under_way(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(400, seed=56)
    with monkeypatch.context() as patch:
        # The copies' end goes unnoticed for as long as this lasts.
        patch.setattr(worker(), "_collect", lambda: None)
        running.generate(ids, 1)
        assert running.connector.has_pending_push_work()
        assert running.device_blocks_in_use() == 3
        assert running.reset_device_cache()
    settled(running)
    # It was given up: its source might have changed under it.
    assert running.generate(ids, 1).cached == 0
    settled(running)
