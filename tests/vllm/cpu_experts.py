"""A worker's extension that lets ranks divide a model's experts on vLLM's CPU platform.

vLLM 0.32 starts with ``enable_expert_parallel`` there, and fails at the first request. Its kernel takes the numbers of
the experts of all ranks for those of its own, reads past their weights, and the worker ends by a signal. Data-parallel
ranks cannot send each other their tokens (NotImplementedError).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_apply = CPUUnquantizedExperts.apply


def _apply_own(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **rest: Any) -> None:
    """Compute a rank's own experts, and leave the others to the other ranks: all parts are added up."""
    if expert_map is not None:
        own = expert_map[topk_ids]
        topk_weights, topk_ids = topk_weights * (own >= 0), own.clamp(min=0).to(topk_ids.dtype)
    _apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **rest)


def _of_all_ranks(self: CpuCommunicator, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The tokens of all ranks, which may have different numbers of them; of several tensors, if it is a list."""
    found: list[Any] = [None] * self.world_size
    torch.distributed.all_gather_object(found, input_, group=self.cpu_group)
    if isinstance(input_, torch.Tensor):
        return torch.cat(found)
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _own_sum(self: CpuCommunicator, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The sum of what all ranks have computed, of a rank's own tokens."""
    torch.distributed.all_reduce(input_, group=self.cpu_group)
    return input_.split(sizes or len(input_) // self.world_size)[self.rank_in_group]


CPUUnquantizedExperts.apply = _apply_own  # type: ignore[method-assign]
CpuCommunicator.all_gatherv = _of_all_ranks  # type: ignore[method-assign]
CpuCommunicator.reduce_scatterv = _own_sum  # type: ignore[method-assign]


class Experts:
    """Part of each worker; its module does the rest."""

    model_runner: Any

    def experts_held(self) -> int:
        """The experts whose weights this rank has."""
        parameters = self.model_runner.get_model().named_parameters()
        return next(len(weights) for name, weights in parameters if name.endswith("w13_weight"))
