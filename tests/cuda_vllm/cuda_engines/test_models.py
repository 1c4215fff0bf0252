"""Other KV caches than full attention in float32: windows, and eight bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fake_device
from engine_checks import Reference, flush, nothing_left, stats
from fake_cuda import Fake
from prompts import CACHED, MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine, prompt

Make = Callable[..., Engine]


def test_windows(fake: Fake, engine: Make, gemma2: Path) -> None:
    """A window of 256 tokens in half of the layers."""
    long = [prompt(400), prompt(300)[:280] + prompt(90, seed=2), prompt(400, seed=1)]
    plain = Reference(gemma2, blocks=120, **fake_device.ENGINE)
    expected = [plain(ids, TOKENS) for ids in long]
    plain.close()
    one = engine(gemma2, MEMORY, blocks=120)
    slow(fake)
    assert tokens(one.generate_all(long, TOKENS)) == expected
    nothing_left(one)
    hit = one.generate_all(long, TOKENS)
    assert tokens(hit) == expected
    assert min(cached(hit)) >= 256
    nothing_left(one)


def test_eight_bits(fake: Fake, engine: Make, llama: Path) -> None:
    arguments = {"kv_cache_dtype": "fp8", **fake_device.ENGINE}
    plain = Reference(llama, **arguments)
    expected = [plain(ids, TOKENS) for ids in PROMPTS]
    plain.close()
    one = engine(llama, MEMORY, kv_cache_dtype="fp8")
    slow(fake)
    assert tokens(one.generate_all(PROMPTS, TOKENS)) == expected
    nothing_left(one)
    hit = one.generate_all(PROMPTS, TOKENS)
    assert (tokens(hit), cached(hit)) == (expected, CACHED)
    nothing_left(one)


def test_states(fake: Fake, engine: Make, lfm2: Path, tmp_path: Path) -> None:
    """Half of the layers are convolutions, whose states a hit needs at its end, before the prompt's last token."""
    hits = [192, 224, 176, 0]
    plain = Reference(lfm2, **fake_device.ENGINE)
    expected = [plain(ids, TOKENS) for ids in PROMPTS]
    plain.close()
    options = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB"}
    one = engine(lfm2, options, enable_prefix_caching=True)
    slow(fake)
    assert tokens(one.generate_all(PROMPTS, TOKENS)) == expected
    nothing_left(one)
    hit = one.generate_all(PROMPTS, TOKENS)
    assert (tokens(hit), cached(hit)) == (expected, hits)
    nothing_left(one)
    flush(one)
    one.close()
    second = engine(lfm2, options, enable_prefix_caching=True)
    slow(fake, seed=1)
    hit = second.generate_all(PROMPTS, TOKENS)
    assert (tokens(hit), cached(hit)) == (expected, hits)
    nothing_left(second)
    assert stats(second)["disk_reads"] > 0
    assert stats(second)["checksum_failures"] == stats(second)["load_failures"] == 0
