"""Bytes of real vLLM-shaped KV caches through the arena and back, by the CPU copier."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kv_caches import BLOCKS, allocate, block_content, fill, full, group, mixed_group, plan, sliding, state, storage
from undercroft._core import Arena, Copier, UndercroftError
from undercroft.device.api import Ended, Job
from undercroft.device.cpu import CpuCopier
from undercroft.device.factory import make_copier
from undercroft.device.layout import SUPPORTED_LAYOUTS, DeviceLayout, GroupCopy, Part, device_layout

ARENA = 1 << 20
GROUPS = [group("window", 3, sliding()), group("full", 3, full()), group("state", 3, state(padded=1024))]


def copy_of(group_id: int, blocks: list[int], slots: list[int]) -> GroupCopy:
    return GroupCopy(group_id, np.array(blocks, dtype=np.int64), np.array(slots, dtype=np.int64))


def run(copier: CpuCopier, ticket: int, to_arena: bool, *groups: GroupCopy) -> int:
    (queued,) = copier.submit(to_arena, [Job(ticket, groups)])
    copier.drain()
    assert [(ended.ticket, ended.ok) for ended in copier.poll()] == [(ticket, True)]
    return queued


@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS)
def test_saved_blocks_come_back_into_other_blocks(layout: str) -> None:
    config = plan(layout, GROUPS)
    caches = allocate(config)
    device = device_layout(config, caches)
    copier = CpuCopier(device, Arena.create(ARENA))
    saved = {0: [1, 4], 1: [2, 3, 5], 2: [6]}
    slots = {0: [8192, 40960], 1: [0, 16384, 65536], 2: [131072]}
    expected = {index: [block_content(config, caches, index, b) for b in blocks] for index, blocks in saved.items()}
    queued = run(copier, 1, True, *(copy_of(index, saved[index], slots[index]) for index in saved))
    assert queued == sum(device.groups[index].shard_bytes * len(saved[index]) for index in saved)

    fill(caches, seed=2)
    before = storage(caches).copy()
    loaded = {0: [11, 2], 1: [7, 1, 9], 2: [3]}
    run(copier, 2, False, *(copy_of(index, loaded[index], slots[index]) for index in loaded))
    for index, blocks in loaded.items():
        assert [block_content(config, caches, index, b) for b in blocks] == expected[index]
    changed = np.count_nonzero(storage(caches) != before)
    assert changed <= queued, "bytes outside the loaded blocks were written"


def test_ranks_share_a_payload_side_by_side() -> None:
    config = plan("LBHNC", [group("full", 2, full())])
    arena = Arena.create(ARENA)
    ranks = []
    for rank in range(2):
        caches = allocate(config)
        fill(caches, seed=10 + rank)
        part = Part(rank, 2, by_heads=False)
        ranks.append((caches, CpuCopier(device_layout(config, caches, part), arena)))
    expected = [block_content(config, caches, 0, 3) for caches, _ in ranks]
    for caches, copier in ranks:
        run(copier, 1, True, copy_of(0, [3], [4096]))
        fill(caches, seed=99)
    for (caches, copier), content in zip(ranks, expected, strict=True):
        run(copier, 2, False, copy_of(0, [5], [4096]))
        assert block_content(config, caches, 0, 5) == content
    payload = b"".join(expected[0] + expected[1])
    assert ctypes.string_at(arena.address + 4096, len(payload)) == payload


def test_a_mixed_group_keeps_each_layer() -> None:
    config = plan("BLHNC", [mixed_group("mixed", [full(), full(heads=4), full(), full(head_size=16)])])
    caches = allocate(config)
    copier = CpuCopier(device_layout(config, caches), Arena.create(ARENA))
    expected = block_content(config, caches, 0, 1)
    run(copier, 1, True, copy_of(0, [1], [0]))
    fill(caches, seed=2)
    run(copier, 2, False, copy_of(0, [BLOCKS - 1], [0]))
    assert block_content(config, caches, 0, BLOCKS - 1) == expected


def test_a_refused_copy_queues_nothing() -> None:
    config = plan("LBHNC", GROUPS)
    caches = allocate(config)
    copier = CpuCopier(device_layout(config, caches), Arena.create(ARENA))
    before = storage(caches).copy()
    good = copy_of(1, [1], [0])
    for bad, error, message in [
        (copy_of(1, [2], [ARENA - 8]), UndercroftError, "outside the arena"),
        (copy_of(1, [2], [-8192]), ValueError, "negative"),
        (copy_of(1, [0], [0]), ValueError, "device block 0"),
        (copy_of(3, [1], [0]), ValueError, "group 3"),
    ]:
        with pytest.raises(error, match=message):
            copier.submit(False, [Job(1, [good]), Job(2, [bad])])
    copier.drain()
    assert copier.poll() == []
    assert (storage(caches) == before).all()


def test_an_empty_job_ends() -> None:
    config = plan("LBHNC", GROUPS)
    layout = device_layout(config, allocate(config))
    copier = CpuCopier(layout, Arena.create(ARENA))
    assert copier.submit(True, [Job(4, [])]) == [0]
    assert copier.poll() == [Ended(4, True, 0.0)]


def test_the_device_chooses_the_copier() -> None:
    import torch

    arena = Arena.create(ARENA)
    assert isinstance(make_copier(DeviceLayout(torch.device("cpu"), {}), arena), CpuCopier)
    with pytest.raises(ValueError, match="on meta; CUDA devices and vLLM's CPU platform are supported"):
        make_copier(DeviceLayout(torch.device("meta"), {}), arena)


def test_no_threads_and_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Copier(Arena.create(ARENA), threads=0)
    with pytest.raises(UndercroftError, match="round host_memory"):
        Arena.create(1000)
