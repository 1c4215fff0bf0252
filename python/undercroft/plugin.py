"""The entry point of vLLM's plugin system: registers the connector's name and applies the patches for every process.

vLLM calls `register` in each of its processes, sometimes more than once, even if undercroft is not configured.
`register` raises nothing, since an exception would end vLLM.
"""

from __future__ import annotations

from undercroft.log import logger


def register() -> None:
    """Register the connector's name and patch vLLM's classes. Calling it again changes nothing."""
    try:
        from undercroft import registration, vllm_patches

        vllm_patches.reject_requests()
        vllm_patches.mark_media()
        vllm_patches.keep_lookahead_hashes(registration.is_ours)
        vllm_patches.check_configuration(registration.check_options)
        vllm_patches.recompute_own_failed_loads(registration.ours_in)
        vllm_patches.judge_all_hits(registration.ours_in)
        vllm_patches.count_ranks()
        vllm_patches.show_stages()
        vllm_patches.watch_weights(registration.caches_in)
        vllm_patches.show_to_tiers(registration.tiers_in)
        registration.register_name()
    except Exception as error:
        logger.error(
            "undercroft: the connector is not registered; vLLM knows it only by kv_connector_module_path: %s",
            error,
            exc_info=error,
        )
