"""Loads vLLM's compiled extension over the fake CUDA and copies with its operator; run by test_cuda_wheels."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from fake_cuda import Fake
from undercroft._core import Arena, BlockPages
from undercroft.device.memcpy import MAX_COPIES, VllmCopy

COPIES, SIZE = 5000, 256


def side_by_side(address: int, size: int) -> BlockPages:
    """Blocks of ``size`` bytes, one after the other from ``address`` on."""
    return BlockPages(*(np.array([value], dtype=np.int64) for value in (address, size, size, 0)))


def main(library: str) -> None:
    """Both directions, on a stream of the second device, of more copies than one call takes; then a refusal."""
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    torch.ops.load_library(library)
    operator = torch.ops._C_cache_ops.swap_blocks_batch
    schema = str(operator.default._schema)
    # Names of arguments do not matter: they are passed by place.
    kinds = [str(argument.type) for argument in operator.default._schema.arguments]
    assert kinds == ["Tensor", "Tensor", "Tensor", "bool"], schema
    assert operator.default._schema.arguments[3].default_value is False, schema
    copy, fake, stream = VllmCopy(operator), Fake(), torch.cuda.Stream(device)
    host = torch.empty(2 * COPIES * SIZE, dtype=torch.uint8, pin_memory=True)
    host.numpy()[:] = np.random.default_rng(0).integers(0, 256, host.numel(), dtype=np.uint8)
    there = torch.empty(COPIES * SIZE, dtype=torch.uint8, device=device)
    order = np.random.default_rng(1).permutation(COPIES)
    pieces = side_by_side(there.data_ptr(), SIZE).pieces(order, np.arange(COPIES) * SIZE, SIZE)

    def both_ways() -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            copy(pieces, host.data_ptr(), stream.cuda_stream, to_arena=False)
            copy(pieces, host.data_ptr() + COPIES * SIZE, stream.cuda_stream, to_arena=True)

    counted = fake.during(both_ways)
    stream.synchronize()
    assert torch.equal(host[: COPIES * SIZE], host[COPIES * SIZE :]), "other bytes came back"
    calls = 2 * -(-COPIES // MAX_COPIES)
    assert (counted["batches"], counted["descriptors"]) == (calls, 2 * COPIES), counted
    assert fake.violations() == []
    # One byte beyond pinned memory: the driver refuses, and the operator says so.
    arena = Arena.create(8192)
    assert int(torch.cuda.cudart().cudaHostRegister(arena.address, 4096, 1)) == 0
    with pytest.raises(RuntimeError), torch.cuda.stream(stream):
        one = side_by_side(there.data_ptr(), 2).pieces(np.array([0]), np.array([4095]), 1 << 30)
        copy(one, arena.address, stream.cuda_stream, to_arena=False)
    print(schema)
    print("everything was copied")


main(sys.argv[1])
