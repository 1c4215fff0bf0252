"""Batches of copies as the driver and vLLM get them; stand-ins for both copy host memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from undercroft._core import BlockPages
from undercroft.device import memcpy
from undercroft.device.memcpy import BatchedCopy, DriverBatch, DriverLoop, VllmCopy, batched_copy, driver_copy

STREAM = 0x5EAD
Batch = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    *[ctypes.c_void_p] * 3,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
)

Create = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
Record = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)
Query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p)


def side_by_side(address: int, size: int) -> BlockPages:
    """Blocks of ``size`` bytes, one after the other from ``address`` on."""
    return BlockPages(*(np.array([value], dtype=np.int64) for value in (address, size, size, 0)))


class Function:
    """A driver's function: callable, and carrying the types that ctypes keeps on it."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, *args: Any) -> int:
        return self.call(*args)


class Driver:
    """``libcuda`` as far as it is used here. Everything happens at once."""

    def __init__(self, version: int, code: int = 0) -> None:
        self.code = code
        self.calls = 0
        self.counts: list[int] = []
        self.fail_at: int | None = None
        """Call of which the third copy fails, if it is given."""
        self.attributes: list[tuple[int, ...]] = []
        self.events = 0

        @Batch
        def batch(dsts, srcs, sizes, count, attributes, begins, attribute_count, failed, stream) -> int:
            self.calls += 1
            self.counts.append(count)
            if self.fail_at == len(self.counts):
                ctypes.c_size_t.from_address(failed).value = 2
                return 7
            arrays = [np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(a)) for a in (dsts, srcs, sizes)]
            words = (ctypes.c_uint * 6).from_address(attributes)
            begin = ctypes.c_size_t.from_address(begins).value
            self.attributes.append((*words, begin, attribute_count))
            for destination, source, size in zip(*arrays, strict=True):
                ctypes.memmove(int(destination), int(source), int(size))
            ctypes.c_size_t.from_address(failed).value = count - 1
            assert stream == STREAM
            return self.code

        @Create
        def create(event: int, flags: int) -> int:
            self.events += 1
            ctypes.c_void_p.from_address(event).value = self.events
            return 0

        @Record
        def record(event: int, stream: int) -> int:
            assert 0 < event <= self.events
            assert stream == STREAM
            return 0

        @Query
        def query(event: int) -> int:
            assert 0 < event <= self.events
            return 0

        functions = {"cuMemcpyBatchAsync": batch, "cuEventCreate": create, "cuEventRecord": record}
        functions["cuEventQuery"] = query
        uncalled = ("cuStreamWaitEvent", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel")
        functions |= dict.fromkeys(uncalled, query)

        def find(name: bytes, address: int, asked: int, flags: int, status: int) -> int:
            assert flags == 0
            if asked > version:
                return 500
            ctypes.c_void_p.from_address(address).value = ctypes.cast(functions[name.decode()], ctypes.c_void_p).value
            return 0

        def single(destination: int, source: int, size: int, stream: int) -> int:
            self.calls += 1
            ctypes.memmove(destination, source, size)
            assert stream == STREAM
            return self.code

        self.keep = functions
        self.cuGetProcAddress_v2 = Function(find)
        self.cuMemcpyAsync = Function(single)


def check(copy: BatchedCopy) -> None:
    """Loads, and then saves, three pages of one block."""
    offsets, sizes = np.array([3, 100, 200]), np.array([10, 50, 56])
    for to_arena in (False, True):
        there, arena = np.arange(256, dtype=np.uint8), np.zeros(256, dtype=np.uint8)
        source, target = (there, arena) if to_arena else (arena, there)
        source[:], target[:] = np.arange(256), 0
        pages = BlockPages(offsets + there.ctypes.data, sizes, sizes, offsets)
        copy(pages.pieces(np.array([0]), np.array([0]), 1 << 20), arena.ctypes.data, STREAM, to_arena=to_arena)
        for begin, size in [(3, 10), (100, 50), (200, 56)]:
            assert (target[begin : begin + size] == source[begin : begin + size]).all()
        assert np.count_nonzero(target) == 116


def copy_each_byte(copy: BatchedCopy, count: int) -> None:
    target, source = np.zeros(count, dtype=np.uint8), np.arange(count, dtype=np.uint8)
    pieces = side_by_side(target.ctypes.data, count).pieces(np.array([0]), np.array([0]), 1)
    copy(pieces, source.ctypes.data, STREAM, to_arena=False)
    assert (target == source).all()


def test_a_new_driver_takes_a_batch_in_one_call() -> None:
    driver = Driver(13000)
    copy = driver_copy(driver)
    assert isinstance(copy, DriverBatch)
    check(copy)
    assert driver.calls == 2
    # Sources in stream order, no places hinted at, beside compute if possible; the entry holds from the first copy on.
    assert driver.attributes == [(1, 0, 0, 0, 0, 1, 0, 1)] * 2


def test_an_old_driver_copies_one_by_one() -> None:
    for driver in (Driver(12040), SimpleNamespace(cuMemcpyAsync=Driver(0).cuMemcpyAsync)):
        copy = driver_copy(driver)
        assert isinstance(copy, DriverLoop)
        check(copy)


@pytest.mark.parametrize(
    ("version", "message"),
    [(13000, "cuMemcpyBatchAsync failed with error 7 at copy 2"), (0, "cuMemcpyAsync of 10 bytes .* error 7")],
)
def test_a_copy_that_the_driver_refuses_is_reported(version: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        check(driver_copy(Driver(version, code=7)))


@pytest.mark.parametrize("version", [13000, 0])
def test_thousands_of_copies_are_cut_into_calls_and_an_error_names_its_copy(version: int) -> None:
    driver = Driver(version)
    copy = driver_copy(driver)
    copy_each_byte(copy, 10_000)
    if version:
        assert driver.counts == [128] * 78 + [16]
        assert driver.events == 4, "copies in flight are counted by few events"
        driver.fail_at = len(driver.counts) + 3
        with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed with error 7 at copy 258"):
            copy_each_byte(copy, 10_000)


def swap_blocks_batch(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, any_order: bool) -> None:
    assert {tensor.dtype for tensor in (src, dst, sizes)} == {torch.int64}
    assert not any_order, "a save reads what the model writes"
    assert sizes.numel() <= memcpy.MAX_COPIES
    for destination, source, size in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(destination, source, size)


def test_the_driver_comes_before_vllms_operator_whose_errors_can_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcpy.torch.ops, "_C_cache_ops", SimpleNamespace(swap_blocks_batch=swap_blocks_batch))
    monkeypatch.setattr(memcpy.driver, "load", lambda: Driver(13000))
    assert isinstance(batched_copy(), DriverBatch)
    monkeypatch.setattr(memcpy.driver, "load", lambda: Driver(12040))
    assert isinstance(batched_copy(), DriverLoop)


def test_vllms_operator_copies_where_the_driver_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcpy.torch.ops, "_C_cache_ops", SimpleNamespace(swap_blocks_batch=swap_blocks_batch))
    monkeypatch.setattr(memcpy.driver, "LIBRARY", "libnone.so.1")
    copy = batched_copy()
    assert isinstance(copy, VllmCopy)
    check(copy)
    copy_each_byte(copy, 5000)


def test_a_missing_driver_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcpy.torch.ops, "_C_cache_ops", SimpleNamespace())
    monkeypatch.setattr(memcpy.driver, "LIBRARY", "libnone.so.1")
    with pytest.raises(RuntimeError, match=r"libnone\.so\.1: cannot open.*install the NVIDIA driver"):
        batched_copy()


def test_pieces_are_whole_unless_they_are_cut() -> None:
    pages = side_by_side(4096, 100)
    blocks = np.array([1, 2, 4])
    assert pages.pieces(blocks, np.array([0, 100, 200])).list() == [(4196, 0, 200), (4496, 200, 100)]
    assert pages.pieces(blocks[:1], np.array([0]), 64).list() == [(4196, 0, 64), (4260, 64, 36)]
    for wrong in ((blocks, blocks[:1]), (-blocks, blocks), (blocks, blocks, 0)):
        with pytest.raises(ValueError):
            pages.pieces(*wrong)
