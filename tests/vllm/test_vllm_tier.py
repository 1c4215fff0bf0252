"""undercroft as a tier of vLLM's own offloading, in real engines: the tokens are those of a vLLM without any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import connector_engine
import cpu_tier_spec
from connector_engine import LONG, OTHER, TOKENS, References
from hybrid_engine import BEST, MODELS, Model
from real_engine import prompt
from tier_engine import OFFLOADING, Make, extra_config, flip_payload_bytes, hits, saved, settled, stats, tier_of
from undercroft import _core
from undercroft.log import logger
from undercroft.vllm_tier import prompts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

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
    hits(first, reference, LONG, 0)
    hits(first, reference, LONG, 896)
    assert stats(first)["disk_reads"] == 0, "vLLM's own host memory had it"
    for ids in CROWD:
        first.generate(ids, 4)
        settled(first)
    # vLLM's host memory has 16 chunks, and the last prompts take them.
    hits(first, reference, LONG, 896)
    first.close()

    second = engine(llama, options, **OFFLOADING)
    hits(second, reference, OTHER, 640)
    assert stats(second)["disk_reads"] == 5
    for ids in CROWD:
        hits(second, reference, ids, 896, tokens=4)


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


@pytest.mark.parametrize("name", MODELS)
def test_a_hit_ends_in_what_vllm_has_loaded_for_another_prompt(
    name: str, engine: Make, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """vLLM's host memory has the beginning, and of windows and states only what the longer prompt needs at its end."""
    model = Model(name, request.getfixturevalue(name), *MODELS[name])
    options = extra_config(tmp_path / "cache", cpu_bytes_to_use=256 << 20)
    settings = {"dtype": model.dtype, "blocks": 96, **OFFLOADING}
    size = model.block
    base, long = model.ids(3, extra=9), model.ids(5, extra=9)
    ends_there = base[: 3 * size] + prompt(size + 50, seed=7)
    continues = base[: 3 * size] + prompt(size + 9, seed=6)
    first, whole = engine(model.directory, options, **settings), {}
    for ids in (base, long, continues):
        whole[len(ids)] = first.generate(ids, TOKENS, logprobs=BEST)
        settled(first)
    whole[len(ends_there)] = first.generate(ends_there, TOKENS, logprobs=BEST, cache_salt="alone")
    settled(first)
    first.close()
    for ids, blocks in ((ends_there, 3), (continues, 4)):
        second = engine(model.directory, options, **settings)
        for asked, hit in ((long, 5), (ids, blocks)):
            again = second.generate(asked, TOKENS, logprobs=BEST)
            assert model.same(again, whole[len(asked)])
            assert again.cached == hit * size
            settled(second)
        assert stats(second)["load_failures"] == 0
        second.close()


def test_states_are_saved_that_vllm_copies_before_their_prefixes(
    engine: Make, qwen3_next: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies from the device end in vLLM's order, one in a step."""

    def one_at_a_time(worker: Any) -> list[Any]:
        done, worker._done = worker._done[:1], worker._done[1:]
        return done

    monkeypatch.setattr(cpu_tier_spec.CpuTierWorker, "get_finished", one_at_a_time)
    model = Model("qwen3_next", qwen3_next, *MODELS["qwen3_next"])
    options = extra_config(tmp_path / "cache", cpu_bytes_to_use=256 << 20)
    settings = {"dtype": model.dtype, "blocks": 96, **OFFLOADING}
    prompts = [model.ids(2, extra=9), model.ids(3, seed=1), model.ids(1, extra=9) + prompt(model.block, seed=2)]
    first = engine(model.directory, options, **settings)
    first.generate_all(prompts, 4)
    settled(first)
    first.close()
    second = engine(model.directory, options, **settings)
    again = second.generate_all(prompts, 4)
    assert [one.cached for one in again] == [blocks * model.block for blocks in (2, 3, 2)]
    settled(second)


def test_states_are_saved_although_vllm_finds_room_for_their_prefixes_only_later(
    engine: Make, qwen3_next: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM copies the states of a prompt, has no room for its chunks, and tries those again in the next steps."""
    model = Model("qwen3_next", qwen3_next, *MODELS["qwen3_next"])
    options = extra_config(tmp_path / "cache", cpu_bytes_to_use=256 << 20)
    settings = {"dtype": model.dtype, "blocks": 96, **OFFLOADING}
    ids = model.ids(2, extra=9)
    first = engine(model.directory, options, **settings)
    manager, refused = first.connector.connector_scheduler.manager, []
    prepare_store = manager.prepare_store

    def without_room(keys: Any, context: Any) -> Any:
        if len(keys) > 1 and len(refused) < 5:
            refused.append(len(keys))
            return None
        return prepare_store(keys, context)

    monkeypatch.setattr(manager, "prepare_store", without_room)
    first.generate(ids, TOKENS)
    assert len(refused) == 5, "the last steps have room"
    settled(first)
    first.close()
    second = engine(model.directory, options, **settings)
    assert second.generate(ids, TOKENS).cached == 2 * model.block
    settled(second)


def test_a_chunk_of_several_blocks(engine: Make, llama: Path, reference: References, tmp_path: Path) -> None:
    options = extra_config(tmp_path / "cache", blocks_per_chunk=2)
    saved(engine, llama, options, LONG)
    second = engine(llama, options, **OFFLOADING)
    hits(second, reference, LONG, 768)
    second.close()
    # Chunks of another size are in another namespace.
    third = engine(llama, extra_config(tmp_path / "cache"), **OFFLOADING)
    hits(third, reference, LONG, 0)


def test_a_hit_is_as_long_as_vllms_host_memory(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    saved(engine, llama, extra_config(tmp_path / "cache"), LONG)
    second = engine(llama, extra_config(tmp_path / "cache", rows=4), **OFFLOADING)
    for _ in range(2):
        hits(second, reference, LONG, 512)


def test_prompts_that_arrive_together_leave_each_other_room(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the prompts before one may run for longer than a second, after which it gives up.
    monkeypatch.setattr(prompts, "_CROWDED_MAX_S", 60.0)
    saved(engine, llama, extra_config(tmp_path / "cache", rows=64), *CROWD)
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
    hits(first, reference, LONG, 384)  # from vLLM's own host memory
    first.close()
    hits(engine(llama, options, **OFFLOADING), reference, LONG, 896)


def test_bytes_that_were_damaged_on_disk_are_computed(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    options = extra_config(tmp_path / "cache")
    saved(engine, llama, options, LONG)
    flip_payload_bytes(tmp_path / "cache")
    second = engine(llama, options, **OFFLOADING)
    damaged = second.generate(LONG, TOKENS)
    assert damaged.tokens == reference(LONG)
    assert damaged.cached < 896
    settled(second)
    assert stats(second)["checksum_failures"] > 0
    hits(second, reference, LONG, 896)


def test_chunks_that_a_load_does_not_bring_are_asked_for_again(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = extra_config(tmp_path / "cache")
    saved(engine, llama, options, LONG)
    second = engine(llama, options, **OFFLOADING)
    cache, short = tier_of(second)._cache, [256, 0]
    begin_load = cache.begin_load
    # Reads that fail between the lookup and the load would have this effect.
    monkeypatch.setattr(
        cache,
        "begin_load",
        lambda name, blocks, *, begin, end: begin_load(name, blocks, begin=begin, end=end - short.pop(0)),
    )
    hits(second, reference, LONG, 896)
    assert short == [], "one load for five chunks, and one for the two others"


def test_a_disk_that_is_too_small_stays_bounded(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    one = engine(llama, extra_config(tmp_path / "cache", rows=32, disk_capacity="36MiB"), **OFFLOADING)
    for ids in (*TALL, TALL[-1], TALL[0]):
        assert one.generate(ids, 4).tokens == reference(ids, 4)
        settled(one)
    assert stats(one)["disk_evictions"] > 0
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").rglob("*")) < 40 << 20


def test_a_reset_leaves_nothing_to_find(engine: Make, llama: Path, reference: References, tmp_path: Path) -> None:
    options = extra_config(tmp_path / "cache")
    one = engine(llama, options, **OFFLOADING)
    one.generate(LONG, TOKENS)
    settled(one)
    assert one.generate(LONG, TOKENS).cached == 896, "a reset of vLLM's prefix cache alone keeps the tiers"
    settled(one)
    assert one.reset_device_cache(connector=True)
    hits(one, reference, LONG, 0)
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
    hits(second, reference, OTHER, 640)  # the blocks from before the change


def test_a_reset_that_nobody_confirms_lets_vllm_go_on(
    engine: Make,
    llama: Path,
    reference: References,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    one = engine(llama, extra_config(tmp_path / "cache"), **OFFLOADING)
    one.generate(LONG, TOKENS)
    settled(one)
    cache = tier_of(one)._cache
    with monkeypatch.context() as patch:
        patch.setattr(cache, "session", Unconfirmed(cache.session))
        assert one.reset_device_cache(connector=True)
    assert "a reset was not confirmed within 1 s" in caplog.text
    hits(one, reference, LONG, 0)


class Unconfirmed:
    """A session whose resets are not durable in time."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def reset(self, timeout_s: float) -> bool:
        self._session.reset(timeout_s)
        return False


def test_saves_that_run_when_weights_change_are_given_up(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = extra_config(tmp_path / "cache")
    one = engine(llama, options, **OFFLOADING)
    cache = tier_of(one)._cache
    with monkeypatch.context() as patch:
        patch.setattr(cache, "poll", list)
        one.generate(LONG, TOKENS)
        assert cache.busy
        one.core.collective_rpc("get_model")
    assert one.reset_device_cache()
    settled(one)
    assert stats(one)["given_up_saves_weights"] > 0
    one.close()
    second = engine(llama, options, **OFFLOADING)
    hits(second, reference, LONG, 0)


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


TWO_RANKS = {"executor": "mp", "tensor_parallel_size": 2, **OFFLOADING}


def test_two_ranks_share_the_rows(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = extra_config(tmp_path / "cache")
    saved(engine, llama, options, OTHER)
    for start in range(2):
        one = engine(llama, options, **TWO_RANKS)
        hits(one, reference, LONG, 896 * start)  # the cache of another number of ranks is another one
        assert (stats(one)["disk_reads"] > 0) == (start > 0)
        one.close()


def test_the_canonical_layout_shares_the_cache_between_numbers_of_ranks(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = extra_config(tmp_path / "cache", canonical_layout=True)
    saved(engine, llama, options, LONG)
    two = engine(llama, options, **TWO_RANKS)
    hits(two, reference, LONG, 896)
    assert stats(two)["disk_reads"] == 7
    hits(two, reference, CROWD[0], 0, tokens=4)
    two.close()
    one = engine(llama, options, **OFFLOADING)
    hits(one, reference, CROWD[0], 896, tokens=4)
