"""Pages and shards of KV caches that vLLM's own planner and allocator made."""

from __future__ import annotations

import numpy as np
import pytest

from kv_caches import BLOCKS, allocate, full, group, mixed_group, plan, scheduler_config, sliding, state, storage
from undercroft.device.layout import (
    SUPPORTED_LAYOUTS,
    LayoutError,
    check_blocks,
    device_layout,
    group_shard_bytes,
    unsupported_reason,
)

FULL_PAGE = 2 * 16 * 16 * 2

GROUPS = {
    "one": [group("full", 4, full())],
    "hybrid": [group("window", 3, sliding()), group("full", 3, full())],
    "padded": [group("state", 2, state(padded=FULL_PAGE)), group("full", 2, full())],
    "mixed": [mixed_group("mixed", [full(), full(heads=4), full(), full(head_size=16), full(heads=4)])],
    "aligned": [group("full", 3, full(block_stride_alignment=768))],
}


@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_shard_bytes_agree_and_runs_cover_every_view(layout: str, groups: str) -> None:
    config = plan(layout, GROUPS[groups])
    caches = allocate(config)
    found = device_layout(config, caches)
    raw = storage(caches)
    for index, spec in enumerate(config.kv_cache_groups):
        pages = found.groups[index]
        assert (
            pages.shard_bytes == group_shard_bytes(config, index) == group_shard_bytes(scheduler_config(config), index)
        )
        assert pages.shard_bytes == pages.sizes.sum()
        assert pages.offsets.tolist() == [0, *np.cumsum(pages.sizes)[:-1].tolist()]
        for block in (1, BLOCKS - 1):
            touched = np.zeros(raw.size, dtype=bool)
            for address, stride, size in zip(pages.addresses, pages.strides, pages.sizes, strict=True):
                start = address - raw.ctypes.data + block * stride
                assert not touched[start : start + size].any(), "runs overlap"
                touched[start : start + size] = True
            before = raw.copy()
            for name in spec.layer_names:
                caches[name][block].zero_()
            changed = raw != before
            raw[:] = before
            assert not (changed & ~touched).any(), "a byte that attention writes is in no run"


def test_padding_is_left_out_where_the_spec_is_known() -> None:
    config = plan("LBHNC", GROUPS["padded"])
    assert group_shard_bytes(config, 0) == 2 * (3 * 20 * 2 + 2 * 8 * 4)
    assert group_shard_bytes(config, 1) == 2 * FULL_PAGE


@pytest.mark.parametrize(("layout", "runs"), [("LBHNC", 4), ("LBNHC", 4), ("BLHNC", 1), ("BLNHC", 1)])
def test_layers_that_lie_side_by_side_are_one_run(layout: str, runs: int) -> None:
    config = plan(layout, GROUPS["one"])
    assert device_layout(config, allocate(config)).groups[0].sizes.tolist() == [4 * FULL_PAGE // runs] * runs


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_split_pages_are_declined_by_name(layout: str) -> None:
    config = plan(layout, GROUPS["one"])
    assert layout in (unsupported_reason(config) or "")
    assert layout in (unsupported_reason(scheduler_config(config)) or "")
    with pytest.raises(LayoutError, match=layout):
        device_layout(config, allocate(config))


def test_split_pages_are_declined_by_their_strides() -> None:
    config = plan("LBHNC", GROUPS["one"])
    caches = allocate(config)
    config.kv_cache_layout = None
    device_layout(config, caches)
    blocks, heads, tokens, content = caches["full.2"].shape
    strides = (caches["full.2"].stride(0), blocks * tokens * content, content, 1)
    caches["full.2"] = caches["full.2"].as_strided((blocks, heads, tokens, content), strides)
    with pytest.raises(LayoutError, match=r"full\.2: the page of a block is not one run"):
        device_layout(config, caches)


def test_kernel_blocks_are_grouped() -> None:
    config = plan("LBHNC", GROUPS["one"])
    caches = allocate(config, kernel_block_sizes=[4])
    assert caches["full.0"].shape[0] == 4 * BLOCKS
    assert device_layout(config, caches).groups[0].sizes.tolist() == [FULL_PAGE] * 4


def test_tensors_that_lie_elsewhere_are_declined() -> None:
    config = plan("LBHNC", GROUPS["one"])
    caches = allocate(config)
    swapped = caches | {"full.1": caches["full.2"], "full.2": caches["full.1"]}
    with pytest.raises(LayoutError, match=r"full\.1 begins at byte"):
        device_layout(config, swapped)
    with pytest.raises(LayoutError, match=r"full\.3 .*not registered"):
        device_layout(config, {name: cache for name, cache in caches.items() if name != "full.3"})
    own = caches | {"full.0": caches["full.0"].clone(), "full.1": caches["full.1"].clone()}
    with pytest.raises(LayoutError, match=r"full\.1 begins"):
        device_layout(config, own)


def test_a_storage_that_is_too_short_is_declined() -> None:
    config = plan("LBHNC", GROUPS["one"])
    caches = allocate(config)
    config.num_blocks *= 8
    with pytest.raises(LayoutError, match="reaches to byte"):
        device_layout(config, caches)


def test_group_mixing_devices_or_without_place_is_declined() -> None:
    config = plan("LBHNC", GROUPS["one"])
    caches = allocate(config)
    with pytest.raises(LayoutError, match="one device"):
        device_layout(config, caches | {"full.0": caches["full.0"].to("meta")})
    config.kv_cache_tensors[0].layers[0] = "other"
    with pytest.raises(LayoutError, match=r"full\.0 has no place"):
        group_shard_bytes(config, 0)


def test_copies_follow_blocks_and_slots() -> None:
    config = plan("LBHNC", [group("full", 2, full())])
    layout = device_layout(config, allocate(config)).group(0)
    first, second = layout.addresses.tolist()
    pieces = layout.pages().pieces(np.array([3, 1]), np.array([8192, 0]))
    assert pieces.list() == [
        (first + 3 * FULL_PAGE, 8192, FULL_PAGE),
        (second + 3 * FULL_PAGE, 8192 + FULL_PAGE, FULL_PAGE),
        (first + FULL_PAGE, 0, FULL_PAGE),
        (second + FULL_PAGE, FULL_PAGE, FULL_PAGE),
    ]


@pytest.mark.parametrize("block", [0, -1, BLOCKS])
def test_blocks_that_hold_no_request_are_refused(block: int) -> None:
    config = plan("LBHNC", GROUPS["one"])
    pages = device_layout(config, allocate(config)).groups[0]
    with pytest.raises(ValueError, match=f"device block {block} cannot be copied; blocks 1 to {BLOCKS - 1} can"):
        check_blocks(pages, np.array([1, block]), np.array([0, 0]))


def test_uneven_arrays_are_refused() -> None:
    config = plan("LBHNC", GROUPS["one"])
    pages = device_layout(config, allocate(config)).groups[0]
    with pytest.raises(ValueError, match="as long"):
        check_blocks(pages, np.array([1, 2]), np.array([0]))
