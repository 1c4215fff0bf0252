"""A description that is too long for the directory's table: its longest parts become digests."""

from __future__ import annotations

import bisect
import json
from pathlib import Path

import pytest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from core_values import Group
from fake_config import attention, kv_cache_config, sliding, vllm_config
from undercroft import _core
from undercroft.identity.namespace import describe


def of_layers(names: list[str]) -> str:
    config = kv_cache_config([attention(), sliding()])
    config.kv_cache_groups[0] = KVCacheGroupSpec(names, attention())
    return describe(vllm_config(), config)


def long(count: int, name: str = "language_model.model.layers.{}.self_attn.attn") -> list[str]:
    return [name.format(index) for index in range(count)]


def is_shortened(count: int) -> bool:
    return "sha256" in json.loads(of_layers(long(count)))["groups"]


def longest() -> int:
    """Layers of the longest description that is stored as it is."""
    return bisect.bisect_left(range(1000), 1, key=is_shortened) - 1


def test_the_longest_part_becomes_a_distinct_digest() -> None:
    assert isinstance(json.loads(of_layers(long(100)))["groups"], list)
    text = of_layers(long(2000))
    assert list(json.loads(text)["groups"]) == ["sha256"]
    assert text == of_layers(long(2000))
    assert text != of_layers([*long(1999), "another"])
    # All the rest stays readable.
    assert json.loads(text)["model"]["dtype"] == json.loads(of_layers(long(1)))["model"]["dtype"]


@pytest.mark.parametrize("more", [0, 1, 1000])
def test_every_description_has_an_entry(tmp_path: Path, more: int) -> None:
    """Also beside the sizes of more groups than any model has."""
    text = of_layers(long(longest() + more))
    options = {"host_memory": 64 << 20, "disks": [{"path": str(tmp_path), "capacity": 64 << 20}]}
    groups = [Group("sliding_window", 16, 400_000 - index, 4_000_000_000) for index in range(32)]
    engine = _core.Engine(options)
    engine.register(text, groups, 16)
    assert engine.flush()
    assert engine.stats()["volatile_namespaces"] == 0
    engine.close()
    assert [space["description"] for space in _core.inspect(str(tmp_path))["namespaces"]] == [text]


def test_a_longer_one_is_refused_with_the_reason(tmp_path: Path) -> None:
    engine = _core.Engine({"host_memory": 8 << 20})
    with pytest.raises(Exception, match="does not fit an entry of 28672 bytes"):
        engine.register("x" * (32 << 10), [Group("full", 16, 4096)], 16)
    engine.close()
