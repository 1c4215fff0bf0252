"""Everything that undercroft changes in vLLM, and nothing else: the table is in `undercroft.vllm_patches.table`.

The functions that apply a patch raise nothing and return whether vLLM was changed. Of the rest of the package, only
`undercroft.compat` depends on vLLM's internals.
"""

from __future__ import annotations

from undercroft.vllm_patches.configuration import check_configuration
from undercroft.vllm_patches.connector import (
    before_prefix_cache_reset,
    end_step_at,
    recompute_failed_loads,
    recompute_failed_loads_of_children,
    reconcile_local_hits,
    tell_adapters_apart,
)
from undercroft.vllm_patches.hit_threshold import reject_requests
from undercroft.vllm_patches.table import HIT_THRESHOLD, PATCHES, Patch, patch_table, problem

__all__ = [
    "HIT_THRESHOLD",
    "PATCHES",
    "Patch",
    "before_prefix_cache_reset",
    "check_configuration",
    "end_step_at",
    "patch_table",
    "problem",
    "recompute_failed_loads",
    "recompute_failed_loads_of_children",
    "reconcile_local_hits",
    "reject_requests",
    "tell_adapters_apart",
]
