"""undercroft as a tier of vLLM's own offloading, in real engines: the tokens are those of a vLLM without any cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import connector_engine
from connector_engine import LONG, OTHER, TOKENS, References
from hybrid_engine import BEST, MODELS, Model
from real_engine import Engine, prompt
from tier_engine import extra_config, flip_payload_bytes, settled, stats, tier_of
from undercroft import _core

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

Make = Callable[..., Engine]
OFFLOADING = {"connector": "OffloadingConnector"}
CROWD = [prompt(897, seed=70 + i) for i in range(6)]
TALL = [prompt(1793, seed=80 + i) for i in range(6)]


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS), (OTHER, TOKENS), *((p, 4) for p in CROWD + TALL))


def test_hits_from_vllms_host_memory_from_disk_and_after_a_restart(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    options = extra_config(tmp_path / "cache", rows=16)
    first = engine(llama, options, **OFFLOADING)
    cold = first.generate(LONG, TOKENS)
    assert (cold.cached, cold.tokens) == (0, reference(LONG))
    settled(first)
    warm = first.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (896, reference(LONG))
    assert stats(first)["disk_reads"] == 0, "vLLM's own host memory had it"
    for ids in CROWD:
        first.generate(ids, 4)
        settled(first)
    # vLLM's host memory has 16 chunks, and the last prompts take them.
    back = first.generate(LONG, TOKENS)
    assert (back.cached, back.tokens) == (896, reference(LONG))
    settled(first)
    first.close()

    second = engine(llama, options, **OFFLOADING)
    again = second.generate(OTHER, TOKENS)
    assert (again.cached, again.tokens) == (640, reference(OTHER))
    settled(second)
    assert stats(second)["disk_reads"] == 5
    for ids in CROWD:
        found = second.generate(ids, 4)
        assert (found.cached, found.tokens) == (896, reference(ids, 4))
    settled(second)


@pytest.mark.parametrize("name", MODELS)
def test_windows_and_states_come_back_after_a_restart(
    name: str, engine: Make, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = Model(name, request.getfixturevalue(name), *MODELS[name])
    options = extra_config(tmp_path / "cache", cpu_bytes_to_use=256 << 20)
    settings = {"dtype": model.dtype, "blocks": 96, **OFFLOADING}
    ids = model.ids(4, extra=9)
    first = engine(model.directory, options, **settings)
    cold = first.generate(ids, TOKENS, logprobs=BEST)
    assert cold.cached == 0
    settled(first)
    turn = ids + cold.tokens + prompt(model.block, seed=5)
    whole = first.generate(turn, TOKENS, logprobs=BEST)
    settled(first)
    first.close()
    second = engine(model.directory, options, **settings)
    again = second.generate(turn, TOKENS, logprobs=BEST)
    assert again.cached >= 4 * model.block
    assert model.same(again, whole)
    settled(second)
    assert stats(second)["disk_reads"] > 0


def test_a_chunk_of_several_blocks(engine: Make, llama: Path, reference: References, tmp_path: Path) -> None:
    options = extra_config(tmp_path / "cache", blocks_per_chunk=2)
    first = engine(llama, options, **OFFLOADING)
    assert first.generate(LONG, TOKENS).tokens == reference(LONG)
    settled(first)
    first.close()
    second = engine(llama, options, **OFFLOADING)
    warm = second.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (768, reference(LONG))
    settled(second)
    second.close()
    # Chunks of another size are in another namespace.
    third = engine(llama, extra_config(tmp_path / "cache"), **OFFLOADING)
    cold = third.generate(LONG, TOKENS)
    assert (cold.cached, cold.tokens) == (0, reference(LONG))


def test_a_hit_is_as_long_as_vllms_host_memory(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    first = engine(llama, extra_config(tmp_path / "cache"), **OFFLOADING)
    first.generate(LONG, TOKENS)
    settled(first)
    first.close()
    second = engine(llama, extra_config(tmp_path / "cache", rows=4), **OFFLOADING)
    for _ in range(2):
        warm = second.generate(LONG, TOKENS)
        assert (warm.cached, warm.tokens) == (512, reference(LONG))
        settled(second)


def test_prompts_that_arrive_together_leave_each_other_room(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    first = engine(llama, extra_config(tmp_path / "cache", rows=64), **OFFLOADING)
    for ids in CROWD:
        first.generate(ids, 4)
        settled(first)
    first.close()
    # Six prompts of seven chunks, and host memory for two of them.
    second = engine(llama, extra_config(tmp_path / "cache", rows=14), **OFFLOADING)
    answers = second.generate_all(CROWD, 4)
    assert [answer.tokens for answer in answers] == [reference(ids, 4) for ids in CROWD]
    assert [answer.cached for answer in answers] == [896] * len(CROWD)
    settled(second)


def test_a_prefix_that_the_tier_has_lost_is_saved_again(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    options = extra_config(tmp_path / "cache")
    first = engine(llama, options, **OFFLOADING)
    first.generate(LONG[:385], TOKENS)
    settled(first)
    cleared = _core.operate(tier_of(first)._cache.engine.arena.socket, {"clear": {"what": "all", "erase": False}})
    assert "error" not in cleared
    warm = first.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (384, reference(LONG)), "vLLM's own host memory has the beginning"
    settled(first)
    first.close()
    second = engine(llama, options, **OFFLOADING)
    again = second.generate(LONG, TOKENS)
    assert (again.cached, again.tokens) == (896, reference(LONG))


def test_bytes_that_were_damaged_on_disk_are_computed(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    options = extra_config(tmp_path / "cache")
    first = engine(llama, options, **OFFLOADING)
    first.generate(LONG, TOKENS)
    settled(first)
    first.close()
    flip_payload_bytes(tmp_path / "cache")
    second = engine(llama, options, **OFFLOADING)
    damaged = second.generate(LONG, TOKENS)
    assert damaged.tokens == reference(LONG)
    assert damaged.cached < 896
    settled(second)
    assert stats(second)["checksum_failures"] > 0
    again = second.generate(LONG, TOKENS)
    assert (again.cached, again.tokens) == (896, reference(LONG))


def test_chunks_that_a_load_does_not_bring_are_asked_for_again(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = extra_config(tmp_path / "cache")
    first = engine(llama, options, **OFFLOADING)
    first.generate(LONG, TOKENS)
    settled(first)
    first.close()
    second = engine(llama, options, **OFFLOADING)
    cache, short = tier_of(second)._cache, [256, 0]
    begin_load = cache.begin_load
    # Reads that fail between the lookup and the load would have this effect.
    monkeypatch.setattr(
        cache,
        "begin_load",
        lambda name, blocks, *, begin, end: begin_load(name, blocks, begin=begin, end=end - short.pop(0)),
    )
    warm = second.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (896, reference(LONG))
    assert short == [], "one load for five chunks, and one for the two others"
    settled(second)


def test_a_disk_that_is_too_small_stays_bounded(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    one = engine(llama, extra_config(tmp_path / "cache", rows=32, disk_capacity="36MiB"), **OFFLOADING)
    for ids in (*TALL, TALL[-1], TALL[0]):
        assert one.generate(ids, 4).tokens == reference(ids, 4)
        settled(one)
    assert stats(one)["disk_evictions"] > 0
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").rglob("*")) < 40 << 20


def test_a_disk_that_hangs_costs_a_part_of_the_computing_time(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from undercroft import engine as opening

    options_of = opening.engine_options
    with_faults: Any = lambda *args, **kwargs: options_of(*args, **kwargs) | {"inject_faults": True}  # noqa: E731
    monkeypatch.setattr(opening, "engine_options", with_faults)
    options = extra_config(tmp_path / "cache", promotion_wait="planned")
    first = engine(llama, options, **OFFLOADING)
    for ids in (LONG, *CROWD):
        first.generate(ids, 4)
        settled(first)
    first.close()
    second = engine(llama, options, **OFFLOADING)
    core = tier_of(second)._cache.engine
    assert core.limit_reads(0.0)
    hung = second.generate(LONG, TOKENS)
    assert hung.tokens == reference(LONG)
    assert hung.cached < 896
    found = stats(second)
    assert found["plans_stopped_rest"] + found["plans_stopped_guarantee"] + found["promotions_given_up"] > 0
    core.limit_reads(None)
    for ids in CROWD:
        answer = second.generate(ids, 4)
        assert answer.tokens == reference(ids, 4)
    settled(second)


def test_a_reset_leaves_nothing_to_find(engine: Make, llama: Path, reference: References, tmp_path: Path) -> None:
    options = extra_config(tmp_path / "cache")
    one = engine(llama, options, **OFFLOADING)
    one.generate(LONG, TOKENS)
    settled(one)
    assert one.generate(LONG, TOKENS).cached == 896, "a reset of vLLM's prefix cache alone keeps the tiers"
    settled(one)
    assert one.reset_device_cache(connector=True)
    cold = one.generate(LONG, TOKENS)
    assert (cold.cached, cold.tokens) == (0, reference(LONG))
    settled(one)
    one.close()
    second = engine(llama, options, **OFFLOADING)
    assert second.generate(LONG, TOKENS).cached == 0


def test_blocks_of_changed_weights_are_shared_with_nobody(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    options = extra_config(tmp_path / "cache")
    one = engine(llama, options, **OFFLOADING)
    one.generate(LONG, TOKENS)
    settled(one)
    one.core.collective_rpc("get_model")
    assert one.reset_device_cache()
    one.generate(OTHER, TOKENS)
    settled(one)
    one.close()
    second = engine(llama, options, **OFFLOADING)
    later = second.generate(OTHER, TOKENS)
    assert (later.cached, later.tokens) == (640, reference(OTHER)), "the blocks from before the change"


def test_one_directory_serves_both_modes(engine: Make, llama: Path, reference: References, tmp_path: Path) -> None:
    of_connector = {"host_memory": "64MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}
    for start in range(2):
        for options, arguments, settle in (
            (of_connector, {}, connector_engine.settled),
            (extra_config(tmp_path / "cache"), OFFLOADING, settled),
        ):
            one = engine(llama, options, **arguments)
            answer = one.generate(LONG, TOKENS)
            assert (answer.cached, answer.tokens) == (896 * start, reference(LONG))
            settle(one)
            one.close()
