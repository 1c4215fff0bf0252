"""Everything that undercroft changes in vLLM, and nothing else: the table is in `undercroft.vllm_patches.table`.

The functions that apply a patch raise nothing and return whether vLLM was changed. Elsewhere in the package, only
`undercroft.compat` depends on vLLM's internals.
"""

from __future__ import annotations

from undercroft.vllm_patches.configuration import check_configuration
from undercroft.vllm_patches.connector import (
    after_prefix_cache_reset,
    before_prefix_cache_reset,
    end_reservations,
    end_step_at,
    evict_uncomputed,
    free_loaded,
    lend_to_prefix_cache_reset,
    recompute_failed_loads,
    recompute_load,
    reconcile_local_hits,
    tell_adapters_apart,
)
from undercroft.vllm_patches.data_parallel import count_ranks, ranks_of
from undercroft.vllm_patches.exempt import exempt_requests
from undercroft.vllm_patches.hit_threshold import reject_requests
from undercroft.vllm_patches.inputs import MARK, are_named_by_content, mark_media, tell_embeddings_apart
from undercroft.vllm_patches.lookahead import keep_lookahead_hashes
from undercroft.vllm_patches.multi_connector import judge_all_hits, recompute_own_failed_loads
from undercroft.vllm_patches.offloading import configuration_of_tier, show_to_tiers
from undercroft.vllm_patches.sleep import end_copies_before_sleep, leave_device_before_checkpoint
from undercroft.vllm_patches.stages import show_stages, stages_of
from undercroft.vllm_patches.table import (
    EMBEDDINGS,
    HIT_THRESHOLD,
    OFFLOADING_TIERS,
    PATCHES,
    Patch,
    patch_table,
    problem,
)
from undercroft.vllm_patches.weights import watch_weights

__all__ = [
    "EMBEDDINGS",
    "HIT_THRESHOLD",
    "MARK",
    "OFFLOADING_TIERS",
    "PATCHES",
    "Patch",
    "after_prefix_cache_reset",
    "are_named_by_content",
    "before_prefix_cache_reset",
    "check_configuration",
    "configuration_of_tier",
    "count_ranks",
    "end_copies_before_sleep",
    "end_reservations",
    "end_step_at",
    "evict_uncomputed",
    "exempt_requests",
    "free_loaded",
    "judge_all_hits",
    "keep_lookahead_hashes",
    "leave_device_before_checkpoint",
    "lend_to_prefix_cache_reset",
    "mark_media",
    "patch_table",
    "problem",
    "ranks_of",
    "recompute_failed_loads",
    "recompute_load",
    "recompute_own_failed_loads",
    "reconcile_local_hits",
    "reject_requests",
    "show_stages",
    "show_to_tiers",
    "stages_of",
    "tell_adapters_apart",
    "tell_embeddings_apart",
    "watch_weights",
]
