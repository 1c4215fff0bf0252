"""Payloads that do not depend on the number of ranks: where each rank's heads lie, and where they cannot lie so."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import derive_canonical_mappings
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

import fake_config
from kv_caches import BLOCKS, allocate, full, group, mixed_group, plan, scheduler_config, sliding, state
from manual_streams import AtOnceExecutor, ManualStreams
from undercroft._core import Arena
from undercroft.connector.ranks import Division, division
from undercroft.device.api import GATHER_BELOW, DeviceCopier, Job
from undercroft.device.cpu import CpuCopier
from undercroft.device.cuda import STRATEGIES, CudaCopier
from undercroft.device.lane import Lanes
from undercroft.device.layout import (
    SUPPORTED_LAYOUTS,
    DeviceLayout,
    GroupCopy,
    LayoutError,
    Part,
    device_layout,
    group_shard_bytes,
)
from undercroft.identity.namespace import Naming, describe

HEADS, TOKENS, CONTENT, LAYERS = 8, 16, 16, 3
PAYLOAD = LAYERS * HEADS * TOKENS * CONTENT * 2
BLOCK, SLOT = 5, 4096

Make = Callable[[DeviceLayout, Arena], DeviceCopier]


def on_streams(strategy: str) -> Make:
    def make(layout: DeviceLayout, arena: Arena) -> DeviceCopier:
        lanes = Lanes.make(ManualStreams(0), 4 * PAYLOAD, lambda name: AtOnceExecutor())
        return CudaCopier(layout, arena, lanes, None, strategy=strategy)

    return make


COPIERS: dict[str, Make] = {"cpu": CpuCopier, **{f"cuda {name}": on_streams(name) for name in STRATEGIES}}


class Ranks:
    """A model with `HEADS` heads, or as many as ``heads``, on so many ranks."""

    def __init__(self, layout: str, ranks: int, make: Make, arena: Arena, kernel_block: int, heads: int) -> None:
        self.own, self.arena, self.kernel_block = max(1, heads // ranks), arena, kernel_block
        shards = min(ranks, heads)
        self.config = plan(layout, [group("full", LAYERS, full(heads=self.own))])
        self.caches = [allocate(self.config, kernel_block_sizes=[kernel_block]) for _ in range(shards)]
        parts = [Part(shard, shards) for shard in range(shards)]
        self.layouts = [
            device_layout(self.config, caches, part) for caches, part in zip(self.caches, parts, strict=True)
        ]
        self.copiers = [make(layout, arena) for layout in self.layouts]

    def write(self, block: int, content: np.ndarray) -> None:
        """``content``: [layer, head, token, value]."""
        for view, part in self._pages(block, content):
            view.copy_(torch.from_numpy(part.copy()).view(torch.bfloat16))

    def holds(self, block: int, content: np.ndarray) -> bool:
        return all(np.array_equal(view.view(torch.int16).numpy(), part) for view, part in self._pages(block, content))

    def copy(self, to_arena: bool, block: int) -> None:
        for copier in self.copiers:
            copier.submit(to_arena, [Job(1, [GroupCopy(0, np.array([block]), np.array([SLOT]))])])
            if isinstance(copier, CudaCopier):
                copier._streams.settle()
            copier.drain()
            assert [ended.ok for ended in copier.poll()] == [True]

    def _pages(self, block: int, content: np.ndarray) -> Any:
        """Each rank's view of each layer's page, with the content that belongs there."""
        per_block = TOKENS // self.kernel_block
        for shard, caches in enumerate(self.caches):
            for layer, view in enumerate(caches.values()):
                own = content[layer, shard * self.own : (shard + 1) * self.own]
                pages = own.reshape(self.own, per_block, self.kernel_block, CONTENT).transpose(1, 0, 2, 3)
                yield view[block * per_block : (block + 1) * per_block], pages


def transposed(content: np.ndarray, layout: str, kernel_block: int) -> bytes:
    """The payload of a block: NumPy's transpose of [layer, head, token, value]."""
    layers, heads = content.shape[:2]
    split = content.reshape(layers, heads, TOKENS // kernel_block, kernel_block, CONTENT)
    return split.transpose((0, 2, 1, 3, 4) if layout.endswith("HNC") else (0, 2, 3, 1, 4)).tobytes()


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("heads", [HEADS, 2])
@pytest.mark.parametrize(
    ("layout", "kernel_block"), [*((layout, TOKENS) for layout in SUPPORTED_LAYOUTS), ("LBHNC", 4), ("LBNHC", 4)]
)
def test_every_number_of_ranks_saves_and_loads_the_same_payload(
    layout: str, kernel_block: int, heads: int, copier: str
) -> None:
    arena = Arena.create(1 << 20)
    content = np.random.default_rng(3).integers(-1000, 1000, (LAYERS, heads, TOKENS, CONTENT), dtype=np.int16)
    expected = transposed(content, layout, kernel_block)
    for ranks in (1, 2, 4, 8):
        model = Ranks(layout, ranks, COPIERS[copier], arena, kernel_block, heads)
        ctypes.memset(arena.address, 0xAB, arena.size)
        model.write(BLOCK, content)
        model.copy(True, BLOCK)
        end = SLOT + len(expected)
        assert ctypes.string_at(arena.address + SLOT, len(expected)) == expected, ranks
        assert ctypes.string_at(arena.address, SLOT) == b"\xab" * SLOT
        assert ctypes.string_at(arena.address + end, SLOT) == b"\xab" * SLOT
        model.copy(False, BLOCK + 1)
        assert model.holds(BLOCK + 1, content), ranks
        assert model.holds(BLOCK, content), ranks


@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS)
@pytest.mark.parametrize(("heads", "ranks"), [(8, 1), (8, 2), (8, 8), (2, 8)])
def test_pages_are_those_of_vllms_own_canonical_layout(layout: str, heads: int, ranks: int) -> None:
    own, shards = max(1, heads // ranks), min(heads, ranks)
    config = plan(layout, [group("full", LAYERS, full(heads=own))])
    caches = allocate(config)
    page = group_shard_bytes(config, 0) // LAYERS
    for rank in range(ranks):
        part = Division(shards, ranks // shards).part(rank)
        found = device_layout(config, caches, part).groups[0]
        parallel = SimpleNamespace(
            tensor_parallel_size=ranks,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=ranks,
            rank=rank,
        )
        model = SimpleNamespace(get_total_num_kv_heads=lambda: heads)
        vllm_config: Any = SimpleNamespace(parallel_config=parallel, model_config=model)
        mappings = derive_canonical_mappings(vllm_config, config, dict(caches))
        theirs = np.full(LAYERS * page * shards, -1)
        for layer, mapping in enumerate(mappings.values()):
            assert mapping.parallelism_agnostic
            for run in mapping.runs:
                for nth in range(run.num_fragments):
                    to = layer * page * shards + run.canonical_offset + nth * run.canonical_stride
                    at = layer * page + run.local_offset + nth * run.local_stride
                    theirs[to : to + run.fragment_size] = np.arange(at, at + run.fragment_size)
        ours, at = np.full_like(theirs, -1), 0
        for size, to in zip(found.sizes, found.offsets, strict=True):
            ours[to : to + size] = np.arange(at, at + size)
            at += size
        assert (ours == theirs).all(), rank


@pytest.mark.parametrize(
    ("layout", "one", "two"), [("LBHNC", 3, 3), ("LBNHC", 3, 48), ("BLHNC", 1, 3), ("BLNHC", 1, 48)]
)
def test_one_rank_has_as_few_runs_as_pages_allow(layout: str, one: int, two: int) -> None:
    config = plan(layout, [group("full", LAYERS, full())])
    caches = allocate(config)
    assert len(device_layout(config, caches).groups[0].sizes) == one
    assert len(device_layout(config, caches, Part(1, 2)).groups[0].sizes) == two


def test_a_page_without_heads_and_tokens_is_not_divided_by_heads() -> None:
    config = plan("LBHNC", [group("full", 2, full())])
    caches = allocate(config)
    flat = {name: cache.view(BLOCKS, -1) for name, cache in caches.items()}
    device_layout(config, flat)
    with pytest.raises(LayoutError, match=r"full\.0: a page of shape \(512,\) is not one of heads and tokens"):
        device_layout(config, flat, Part(0, 2))


# Whether payloads depend on the ranks


def model(ranks: int, heads: int = HEADS, specs: list[Any] | None = None, **changes: Any) -> tuple[Any, Any]:
    own = max(1, heads // ranks)
    vllm_config = fake_config.vllm_config(tensor_parallel_size=ranks)
    vllm_config.model_config.get_total_num_kv_heads = lambda: heads
    vllm_config.model_config.hf_text_config = fake_config.HfConfig(num_key_value_heads=heads)
    made = [dataclasses.replace(spec, num_kv_heads=own) for spec in specs or [fake_config.attention()]]
    return vllm_config, fake_config.kv_cache_config(made, **changes)


def described(ranks: int, *args: Any, **changes: Any) -> str:
    configs = model(ranks, *args, **changes)
    return describe(*configs, Naming(model_id="m"), division(*configs).common_shards)


@pytest.mark.parametrize("specs", [[fake_config.attention()], [fake_config.sliding(), fake_config.attention()]])
@pytest.mark.parametrize("heads", [HEADS, 2, 1])
def test_every_number_of_ranks_has_one_identity(heads: int, specs: list[Any]) -> None:
    for ranks in (1, 2, 4, 8):
        divided = division(*model(ranks, heads, specs))
        assert divided == Division(min(ranks, heads), ranks // min(ranks, heads))
        assert [divided.part(rank).shard for rank in range(ranks)] == [
            rank * divided.shards // ranks for rank in range(ranks)
        ]
        assert described(ranks, heads, specs) == described(1, heads, specs)


def test_the_identity_of_one_rank_is_as_it_was() -> None:
    """Caches of one rank stay warm."""
    configs = model(1)
    assert describe(*configs, Naming(model_id="m"), 1) == describe(*configs, Naming(model_id="m"))
    assert '"tensor":1' in described(4)
    assert f'"num_kv_heads":{HEADS}' in described(4)


def test_latents_are_kept_once() -> None:
    spec = MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16,
        max_tp_shards=1,
        kv_quant_mode=KVQuantMode.NONE,
    )
    found = set()
    for ranks in (1, 2, 8):
        # vLLM reports that all ranks have the same, also in a layout that has one token after the other.
        configs = (model(ranks)[0], fake_config.kv_cache_config([spec], kv_tp_replicas=ranks, kv_cache_layout="BLNHC"))
        assert division(*configs) == Division(1, ranks)
        found.add(describe(*configs, Naming(model_id="m"), 1))
    assert len(found) == 1


def quantized(mode: KVQuantMode) -> Any:
    return fake_config.attention(kv_quant_mode=mode)


@pytest.mark.parametrize(
    ("specs", "changes", "reason"),
    [
        (None, {"kv_cache_layout": "LBNHC"}, "layout LBNHC .* many short copies .VLLM_KV_CACHE_LAYOUT=LBHNC"),
        (None, {"kv_cache_layout": "BLHNC"}, "layout BLHNC .* many short copies"),
        (None, {"kv_cache_layout": None}, "layout None"),
        (
            [quantized(KVQuantMode.INT8_PER_TOKEN_HEAD)],
            {},
            "group 0 .* has scales among its values .INT8_PER_TOKEN_HEAD",
        ),
        ([fake_config.attention(), quantized(KVQuantMode.NVFP4)], {}, "group 1 .* has scales"),
        ([fake_config.attention(num_head_slots=1)], {}, "group 0 .FullAttentionSpec. is not divided by"),
        ([fake_config.attention(), fake_config.unknown()], {}, "group 1 .RSWASpec. is not divided by"),
    ],
)
def test_a_cache_that_depends_on_the_ranks_has_an_identity_for_each_number(
    specs: Any, changes: Any, reason: str
) -> None:
    configs = model(2, HEADS, specs, **changes)
    divided = division(*configs)
    assert divided.reason is not None
    assert re.search(reason, divided.reason)
    assert (divided.shards, divided.replicas, divided.common_shards) == (2, 1, 0)
    assert divided.part(1) == Part(1, 2, by_heads=False)
    assert '"tensor":2' in described(2, HEADS, specs, **changes)
    assert described(2, HEADS, specs, **changes) != described(1, HEADS, specs, **changes)


def test_ranks_of_a_gpu_share_payloads_while_their_pages_need_no_gathering() -> None:
    wide = [fake_config.attention(head_size=256)]
    pages = {}
    for ranks in (1, 2, 8):
        vllm_config, config = model(ranks, 8, wide)
        vllm_config.device_config = SimpleNamespace(device_type="cuda")
        divided = division(vllm_config, config)
        pages[ranks] = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        assert (divided.reason is None) == (ranks == 1 or pages[ranks] >= GATHER_BELOW), divided
    assert pages[2] >= GATHER_BELOW > pages[8], "both sides of the border"
    assert f"pages of {pages[8]} bytes" in str(divided.reason)
    assert division(*model(8, 8, wide)).reason is None, "nothing is gathered on a CPU"


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (3, 2)])
def test_heads_that_ranks_do_not_divide_evenly(heads: int, ranks: int) -> None:
    assert division(*model(ranks, heads)).reason == (
        f"KV cache group 0 (FullAttentionSpec) is not divided by the model's {heads} heads of keys and values"
    )


@pytest.mark.parametrize("more", [{"swa_num_key_value_heads": 4}, {"num_kv_heads_per_layer": [2, 4]}])
def test_heads_are_kept_once_only_if_all_layers_have_as_many(more: dict[str, Any]) -> None:
    vllm_config, config = model(4, 2)
    assert division(vllm_config, config) == Division(2, 2)
    vllm_config.model_config.hf_text_config = fake_config.HfConfig(num_key_value_heads=2, **more)
    assert division(vllm_config, config) == Division(4, 1, "layers differ in their number of heads of keys and values")
    vllm_config, config = model(2, 2)
    vllm_config.model_config.hf_text_config = None
    assert division(vllm_config, config) == Division(2, 1), "no rank has what another one has"


def test_states_and_drafts_depend_on_the_ranks() -> None:
    vllm_config, _ = model(2, 4)
    config = plan("LBHNC", [group("full", 2, full()), group("state", 2, state(1024))])
    assert "group 1 (MambaSpec) is not divided" in str(division(vllm_config, config).reason)
    vllm_config, config = model(2)
    vllm_config.speculative_config = SimpleNamespace(
        draft_model_config=vllm_config.model_config, target_model_config=None
    )
    assert "draft" in str(division(vllm_config, config).reason)
    vllm_config.speculative_config.target_model_config = vllm_config.model_config
    assert division(vllm_config, config).reason is None, "a draft without layers, such as n-grams"


@pytest.mark.parametrize(
    "groups",
    [
        [group("full", 3, full())],
        [group("window", 3, sliding()), group("full", 3, full())],
        [mixed_group("mixed", [full(), full(), full(head_size=16)])],
        [mixed_group("mixed", [full(), full(heads=4), full(heads=4)])],
        [group("full", 2, full()), group("state", 2, state(1024))],
    ],
    ids=["one", "hybrid", "sizes", "heads", "states"],
)
@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS)
def test_the_scheduler_and_the_workers_find_the_same(layout: str, groups: list[Any]) -> None:
    vllm_config, _ = model(2, 4)
    config = plan(layout, groups)
    ours, theirs = division(vllm_config, scheduler_config(config)), division(vllm_config, config)
    assert ours.common_shards == theirs.common_shards
    assert (ours.shards, ours.replicas) == (theirs.shards, theirs.replicas)
