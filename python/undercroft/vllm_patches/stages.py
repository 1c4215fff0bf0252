"""The patch that shows the connector the KV cache of every pipeline stage."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from undercroft.vllm_patches.checks import takes
from undercroft.vllm_patches.table import STAGES, failed, guarded, replace

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_STAGES = "_undercroft_stages"


@guarded(STAGES)
def show_stages() -> None:
    """Note the KV cache configurations of all stages in that of each rank, of which vLLM makes the scheduler's."""
    from vllm.v1.engine.core import EngineCore

    core: Any = sys.modules[EngineCore.__module__]
    takes(core, "get_kv_cache_configs", "vllm_config")

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def with_stages(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            configs = original(vllm_config, *args, **kwargs)
            try:
                stages = vllm_config.parallel_config.pipeline_parallel_size
                if stages > 1:
                    # The ranks of a stage follow each other. A copy does not hold the list that holds the copy.
                    each = [copy.copy(config) for config in configs[:: len(configs) // stages]]
                    for config in configs:
                        vars(config)[_STAGES] = each
            except Exception as error:  # undercroft is then off.
                failed(STAGES, error)
            return configs

        return with_stages

    replace((core, "get_kv_cache_configs", wrap))


def stages_of(kv_cache_config: KVCacheConfig) -> Sequence[KVCacheConfig]:
    """The configuration of each pipeline stage, for the scheduler and for every rank: the layers are the stage's, and
    fields that follow from all stages may be unset. The configuration itself if there is one stage, or no list."""
    each: Sequence[KVCacheConfig] = getattr(kv_cache_config, _STAGES, ())
    return each or (kv_cache_config,)
