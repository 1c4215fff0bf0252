"""Python reads it at start, in child processes, too: the fake's kernels move bytes from the start of each process."""

import torch

import fake_cuda

torch.cuda.init()
moving = fake_cuda.run_kernels()
