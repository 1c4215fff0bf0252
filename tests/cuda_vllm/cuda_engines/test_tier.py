"""undercroft as a tier of vLLM's offloading, whose own copies fill and empty the host memory in between."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_cuda
import fake_device
import real_engine
from engine_checks import Reference as Plain
from engine_checks import inject_faults
from fake_cuda import Fake
from full_filesystem import small, take_space
from prompts import PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine, prompt
from tier_engine import OFFLOADING, extra_config, flip_payload_bytes, settled, stats, tier_of, until_no_writes
from tiny_models import Shape, make_deepseek, make_eagle
from undercroft import _core

Make = Callable[..., Engine]
Reference = Callable[..., list[int]]
HITS = [192, 240, 176, 32]
"""Tokens of the prompts in whole blocks."""
ROW = 16 << 10
"""Bytes of a chunk of one block."""
LATENTS = 2 * 16 * (256 + 64) * 4
"""The same of the model with latent attention: layers, tokens, values, size of a number."""
TWO_RANKS: dict[str, Any] = {
    "executor": "mp",
    "tensor_parallel_size": 2,
    "disable_custom_all_reduce": True,
    **OFFLOADING,
}


def options(directory: Path, **more: Any) -> dict[str, Any]:
    """With vLLM's own specification, and host memory for 256 blocks."""
    found = extra_config(directory / "cache", cpu_bytes_to_use=256 * ROW, min_load_tokens=0, **more) | {
        "spec_name": "TieringOffloadingSpec"
    }
    del found["spec_module_path"]
    return found


def is_saved(one: Engine, fake: Fake, expected: list[list[int]], prompts: list[list[int]] = PROMPTS) -> None:
    """The prompts are computed and saved."""
    slow(fake)
    assert tokens(one.generate_all(prompts, TOKENS)) == expected
    settled(one)


def comes_back(
    make: Callable[[], Engine],
    fake: Fake,
    expected: list[list[int]],
    hits: list[int],
    prompts: list[list[int]] = PROMPTS,
) -> Engine:
    """The prompts are computed and saved. They come back from vLLM's host memory, and after a restart from disk, in the
    engine that is returned."""
    first = make()
    is_saved(first, fake, expected, prompts)
    again = first.generate_all(prompts, TOKENS)
    assert (tokens(again), cached(again)) == (expected, hits)
    settled(first)
    assert stats(first)["disk_reads"] == 0
    first.close()
    second = make()
    slow(fake, seed=1)
    again = second.generate_all(prompts, TOKENS)
    assert (tokens(again), cached(again)) == (expected, hits)
    settled(second)
    found = stats(second)
    assert found["disk_reads"] > 0
    assert found["checksum_failures"] == found["load_failures"] == 0
    return second


def test_blocks_come_back(fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    comes_back(lambda: engine(llama, options(tmp_path), **OFFLOADING), fake, expected, HITS)


def test_chunks_of_several_blocks_come_back(
    fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    whole = options(tmp_path) | {"blocks_per_chunk": 2}
    comes_back(lambda: engine(llama, whole, **OFFLOADING), fake, expected, [192, 224, 160, 32])


def test_windows_come_back(fake: Fake, engine: Make, gemma2: Path, tmp_path: Path) -> None:
    """A window of 256 tokens in half of the layers."""
    long = [prompt(400), prompt(300)[:280] + prompt(90, seed=2), prompt(400, seed=1)]
    plain = Plain(gemma2, blocks=120, **fake_device.ENGINE)
    expected = [plain(ids, TOKENS) for ids in long]
    plain.close()
    comes_back(
        lambda: engine(gemma2, options(tmp_path), blocks=120, **OFFLOADING), fake, expected, [384, 368, 384], long
    )


def test_states_come_back(fake: Fake, engine: Make, lfm2: Path, tmp_path: Path) -> None:
    """Half of the layers are convolutions, whose states a hit needs at its end."""
    plain = Plain(lfm2, **fake_device.ENGINE)
    expected = [plain(ids, TOKENS) for ids in PROMPTS]
    plain.close()
    comes_back(
        lambda: engine(lfm2, options(tmp_path), enable_prefix_caching=True, **OFFLOADING),
        fake,
        expected,
        [192, 224, 176, 32],
    )


@pytest.mark.skipif(not fake_cuda.is_loaded(), reason="ranks on GPUs need NCCL")
def test_two_ranks_load_blocks_that_they_have_saved(
    fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank is a process with a device of its own, and copies its half of each row."""
    monkeypatch.setattr(real_engine, "PRELOADED", ["fake_ranks"])
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    last = comes_back(lambda: engine(llama, options(tmp_path), **TWO_RANKS), fake, expected, HITS)
    assert last.core.collective_rpc("broken") == [[], []]


@pytest.mark.skipif(not fake_cuda.is_loaded(), reason="ranks on GPUs need NCCL")
def test_one_rank_and_two_ranks_share_latents(
    fake: Fake, engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the canonical layout, a row has the latents once, which both ranks hold."""
    import mla

    mla.install()
    monkeypatch.setattr(real_engine, "PRELOADED", ["fake_ranks"])
    model, whole = make_deepseek(tmp_path / "model"), options(tmp_path) | {"canonical_layout": True}
    others = [prompt(200, seed=9)]
    plain = Plain(model, **{**fake_device.ENGINE, **mla.ARGUMENTS})
    expected, expected_others = ([plain(ids, TOKENS) for ids in prompts] for prompts in (PROMPTS, others))
    plain.close()

    one = engine(model, whole, **OFFLOADING, **mla.ARGUMENTS)
    is_saved(one, fake, expected)
    one.close()
    [before] = _core.inspect(str(tmp_path / "cache"))["namespaces"]

    two = engine(model, whole, **TWO_RANKS, **mla.ARGUMENTS)
    again = two.generate_all(PROMPTS, TOKENS)
    assert (tokens(again), cached(again)) == (expected, HITS)
    settled(two)
    assert tokens(two.generate_all(others, TOKENS)) == expected_others
    settled(two)
    assert stats(two)["disk_reads"] > 0
    assert stats(two)["checksum_failures"] == stats(two)["load_failures"] == 0
    assert two.core.collective_rpc("broken") == [[], []]
    two.close()
    [after] = _core.inspect(str(tmp_path / "cache"))["namespaces"]
    # Whole blocks of the prompts and their answers; the third has six of the first one's.
    assert (before["bytes"], after["bytes"]) == ((12 + 15 + 6 + 2) * LATENTS, (12 + 15 + 6 + 2 + 12) * LATENTS)

    one = engine(model, whole, **OFFLOADING, **mla.ARGUMENTS)
    again = one.generate_all(others, TOKENS)
    assert (tokens(again), cached(again)) == (expected_others, [192])
    settled(one)


def test_damaged_bytes_are_computed(
    fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    first = engine(llama, options(tmp_path), **OFFLOADING)
    is_saved(first, fake, expected)
    first.close()
    flip_payload_bytes(tmp_path / "cache", ROW)
    second = engine(llama, options(tmp_path), **OFFLOADING)
    slow(fake, seed=1)
    again = second.generate_all(PROMPTS, TOKENS)
    assert tokens(again) == expected
    assert max(cached(again)) <= 96, "prompts share these tokens in the device's own cache"
    settled(second)
    assert stats(second)["checksum_failures"] > 0


def test_a_disk_that_hangs_or_disappears_costs_hits_only(
    fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject_faults(monkeypatch)
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    planned = options(tmp_path)
    planned["secondary_tiers"][0].pop("promotion_wait")
    first = engine(llama, planned, **OFFLOADING)
    is_saved(first, fake, expected)
    first.close()
    second = engine(llama, planned, **OFFLOADING)
    assert tier_of(second)._cache.engine.limit_reads(0.0)
    begin = time.monotonic()
    again = second.generate_all(PROMPTS, TOKENS)
    assert tokens(again) == expected
    assert max(cached(again)) <= 96, "prompts share these tokens in the device's own cache"
    assert time.monotonic() - begin < 30
    assert tier_of(second)._cache.engine.limit_reads(None)
    settled(second)
    second.close()
    shutil.rmtree(tmp_path / "cache")
    third = engine(llama, planned, **OFFLOADING)
    assert tokens(third.generate_all(PROMPTS, TOKENS)) == expected
    settled(third)


def test_a_full_disk_costs_saves_only(
    fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    with small(tmp_path / "filesystem") as filesystem:
        bounded = options(filesystem, disk_capacity="64MiB")
        first = engine(llama, bounded, **OFFLOADING)
        is_saved(first, fake, expected[:1], PROMPTS[:1])
        take_space(filesystem)
        assert tokens(first.generate_all(PROMPTS, TOKENS)) == expected
        settled(first, writes=False)
        until_no_writes(first)
        again = first.generate_all(PROMPTS, TOKENS)
        assert (tokens(again), cached(again)) == (expected, HITS), "vLLM's host memory has all"
        settled(first, writes=False)
        first.close()
        second = engine(llama, bounded, **OFFLOADING)
        again = second.generate_all(PROMPTS, TOKENS)
        # The directory is smaller now, and keeps what lies before its new end.
        found = cached(again)
        assert tokens(again) == expected
        assert (0 < found[0] <= 192, found[1], found[2] <= 96, found[3]) == (True, 0, True, 0)
        settled(second, writes=False)
        assert stats(second)["disk_reads"] > 0
        second.close()


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_drafts_layers_come_back(
    method: str, fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    shape = Shape(hidden=64, intermediate=128, layers=1, heads=4, kv_heads=2, head_dim=32)
    model = make_eagle(tmp_path / "eagle", shape) if method == "eagle" else llama
    draft = {"method": method, "model": str(model), "num_speculative_tokens": 2}

    def make() -> Engine:
        return engine(llama, options(tmp_path), speculative_config=draft, **OFFLOADING)

    comes_back(make, fake, expected, HITS)
