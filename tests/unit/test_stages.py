"""The layers of all pipeline stages are one payload: where each stage's layers lie, and where there is none."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import pickle
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import core

import fake_config
from kv_caches import allocate, block_content, fill, full, group, mixed_group, plan, scheduler_config, sliding, state
from manual_streams import AtOnceExecutor, ManualStreams
from undercroft import vllm_patches
from undercroft._core import Arena
from undercroft.connector.groups import why_unsupported
from undercroft.connector.ranks import Division, division
from undercroft.connector.stages import in_stage, shard_bytes, with_all_layers
from undercroft.device.api import Job
from undercroft.device.cpu import CpuCopier
from undercroft.device.cuda import CudaCopier
from undercroft.device.lane import Lanes
from undercroft.device.layout import SUPPORTED_LAYOUTS, GroupCopy, device_layout
from undercroft.identity.namespace import Naming, describe

BLOCKS = (5, 6)
"""Per group: layers of several groups lie at one place, in other blocks."""
SLOTS = (4096, 65536)


def split(names: list[str], sizes: tuple[int, ...]) -> list[list[str]]:
    ends = np.cumsum(sizes)
    return [names[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def stages_like(config: Any, layout: str, *sizes: tuple[int, ...]) -> list[Any]:
    """vLLM's configuration of each stage; ``sizes``: per group of ``config``, how many layers each stage has."""
    parts = [split(made.layer_names, of_group) for made, of_group in zip(config.kv_cache_groups, sizes, strict=True)]
    groups = [
        [
            dataclasses.replace(made, layer_names=part[stage])
            for made, part in zip(config.kv_cache_groups, parts, strict=True)
        ]
        for stage in range(len(sizes[0]))
    ]
    return [plan(layout, of_stage) for of_stage in groups]


def shown(monkeypatch: pytest.MonkeyPatch, stages: list[Any], ranks: int = 1) -> list[Any]:
    """The configurations as vLLM hands them out while undercroft's plugin is there, one for each stage."""
    configs = [sized(copy.copy(stage)) for stage in stages for _ in range(ranks)]
    monkeypatch.setattr(core, "get_kv_cache_configs", lambda vllm_config, specs: configs)
    assert vllm_patches.show_stages()
    vllm_config = fake_config.vllm_config(pipeline_parallel_size=len(stages), tensor_parallel_size=ranks)
    core.get_kv_cache_configs(vllm_config, [])  # type: ignore[call-arg]
    return pickle.loads(pickle.dumps(configs))[::ranks]


def sized(config: Any) -> Any:
    config.hash_block_size = config.cache_hit_alignment_tokens = 16
    return config


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("copier", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS)
@pytest.mark.parametrize("sizes", [((4,), (3,)), ((2, 2), (1, 2)), ((3, 1), (2, 1)), ((1, 2, 1), (1, 1, 1))])
def test_every_number_of_stages_saves_and_loads_the_same_payload(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[tuple[int, ...], ...], layout: str, copier: str, ranks: int
) -> None:
    """Each layer has heads of its own bytes; the ranks' shards lie side by side or, in LBHNC, head by head."""
    whole = plan(layout, [group("full", 4, full()), group("window", 3, sliding())])
    by_heads = layout == "LBHNC"
    divided = Division(ranks, 1, None if by_heads else "side by side")
    arena = Arena.create(1 << 20)
    one = [allocate(whole) for _ in range(ranks)]
    for rank, caches in enumerate(one):
        fill(caches, seed=rank)
    copied(arena, [device_layout(whole, caches, divided.part(rank)) for rank, caches in enumerate(one)], copier, True)
    expected = ctypes.string_at(arena.address, arena.size)

    ctypes.memset(arena.address, 0, arena.size)
    layouts, places = [], []
    for stage, config in enumerate(shown(monkeypatch, stages_like(whole, layout, *sizes), ranks)):
        for rank in range(ranks):
            caches = allocate(config)
            for made, block in zip(config.kv_cache_groups, BLOCKS, strict=True):
                for name in made.layer_names:
                    caches[name][block] = one[rank][name][block]
            layouts.append(device_layout(config, caches, in_stage(divided.part(rank), config, stage)))
            places.append((config, caches))
    copied(arena, layouts, copier, True)
    assert ctypes.string_at(arena.address, arena.size) == expected

    before = [[block_content(*place, *made) for made in enumerate(BLOCKS)] for place in places]
    for _, caches in places:
        fill(caches, seed=77)
    copied(arena, layouts, copier, False)
    assert [[block_content(*place, *made) for made in enumerate(BLOCKS)] for place in places] == before


def copied(arena: Arena, layouts: list[Any], copier: str, to_arena: bool) -> None:
    groups = [GroupCopy(made, np.array([BLOCKS[made]]), np.array([slot])) for made, slot in enumerate(SLOTS)]
    for layout in layouts:
        if copier == "cpu":
            made: Any = CpuCopier(layout, arena)
        else:
            lanes = Lanes.make(ManualStreams(0), 1 << 16, lambda name: AtOnceExecutor())
            made = CudaCopier(layout, arena, lanes, None)
        made.submit(to_arena, [Job(1, groups)])
        if copier == "cuda":
            made._streams.settle()
        made.drain()
        assert [ended.ok for ended in made.poll()] == [True]


def test_the_scheduler_and_each_stage_find_one_size_and_one_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sized(plan("LBHNC", [group("full", 5, full()), group("window", 3, sliding())]))
    naming = Naming(model_id="m")
    expected = describe(fake_config.vllm_config(), scheduler_config(whole), naming, 1)
    stages = shown(monkeypatch, stages_like(whole, "LBHNC", (3, 2), (1, 2)))
    vllm_config = fake_config.vllm_config(pipeline_parallel_size=2)
    for config in [scheduler_config(stages[0]), *stages]:
        assert why_unsupported(vllm_config, config) is None
        assert shard_bytes(config) == shard_bytes(whole)
        assert describe(vllm_config, with_all_layers(config), naming, 1, has_all_stages=True) == expected
        assert division(vllm_config, config) == division(fake_config.vllm_config(), whole)
    assert [config.kv_cache_groups[0].layer_names for config in stages] == [
        ["full.0", "full.1", "full.2"],
        ["full.3", "full.4"],
    ]


def test_states_of_several_stages_have_the_size_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan("LBHNC", [group("state", 4, state(None))])
    stages = shown(monkeypatch, stages_like(whole, "LBHNC", (3, 1)))
    assert {shard_bytes(config) for config in [scheduler_config(stages[0]), *stages]} == {shard_bytes(whole)}


def test_a_stage_without_layers_of_a_group_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan("LBHNC", [group("full", 4, full()), group("window", 2, sliding())])
    for config in shown(monkeypatch, stages_like(whole, "LBHNC", (2, 2), (2, 0))):
        assert declined(config) == "pipeline_parallel_size = 2: stage 1 has no layer of KV cache group 1"


def test_layers_that_differ_by_stage_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [plan("LBHNC", [group("full", 2, full(heads=heads))]) for heads in (2, 4)]
    for config in shown(monkeypatch, wide):
        assert "the layers of KV cache group 0 (FullAttentionSpec) differ" in declined(config)
    mixed = [plan("LBHNC", [mixed_group("full", [full(), full(heads=4)])]), plan("LBHNC", [group("full", 2, full())])]
    for config in shown(monkeypatch, mixed):
        assert "KV cache group 0 has pages of several sizes" in declined(config)


def test_stages_with_drafts_replicas_or_without_the_plugin_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan("LBHNC", [group("full", 4, full())])
    stages = stages_like(whole, "LBHNC", (2, 2))
    config = shown(monkeypatch, stages)[0]
    assert "speculative decoding" in declined(config, speculative_config=SimpleNamespace(method="eagle"))
    assert "does not show which layers each stage has" in declined(stages[0])
    stages[1].kv_tp_replicas = 2
    assert "the same KV in some stages only" in declined(shown(monkeypatch, stages)[0])


def declined(config: Any, **changes: Any) -> str:
    vllm_config = fake_config.vllm_config(pipeline_parallel_size=2)
    vars(vllm_config).update(changes)
    reason = why_unsupported(vllm_config, config)
    assert reason is not None
    assert re.match("pipeline_parallel_size = 2", reason)
    return reason


def test_an_error_of_ours_leaves_vllms_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "get_kv_cache_configs", lambda vllm_config: ["as it was"])
    assert vllm_patches.show_stages()
    broken: Any = SimpleNamespace()
    assert core.get_kv_cache_configs(broken) == ["as it was"]  # type: ignore[call-arg]
