"""Python reads it at start, in child processes, too: the fake's kernels move bytes from the start of each process."""

import torch

import fake_cuda

torch.cuda.init()
moving = fake_cuda.run_kernels()


def _product(keys: object, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Launches something: the fake has no cuBLAS, and no caller here reads the product."""
    return out.zero_()


moving.impl("mm.out", _product, "CUDA", with_keyset=True)
