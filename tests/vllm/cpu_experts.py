"""A worker's extension that lets ranks divide a model's experts on vLLM's CPU platform.

vLLM 0.32 starts with ``enable_expert_parallel`` there, but its kernel takes the numbers of the experts of all ranks for
those of its own, and reads past their weights at the first request: the worker ends by a signal.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_apply = CPUUnquantizedExperts.apply


def _apply_own(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **rest: Any) -> None:
    """Compute a rank's own experts, and leave the others to the other ranks: all parts are added up."""
    if expert_map is not None:
        own = expert_map[topk_ids]
        topk_weights, topk_ids = topk_weights * (own >= 0), own.clamp(min=0).to(topk_ids.dtype)
    _apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **rest)


CPUUnquantizedExperts.apply = _apply_own  # type: ignore[method-assign]


class Experts:
    """Part of each worker; its module does the rest."""

    model_runner: Any

    def experts_held(self) -> int:
        """The experts whose weights this rank has."""
        parameters = self.model_runner.get_model().named_parameters()
        return next(len(weights) for name, weights in parameters if name.endswith("w13_weight"))
