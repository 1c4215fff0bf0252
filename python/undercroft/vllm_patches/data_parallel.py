"""The patch that tells the data-parallel ranks of a vLLM the number of ranks on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from undercroft.vllm_patches.checks import takes
from undercroft.vllm_patches.table import RANKS, failed, guarded, replace

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_RANKS = "_undercroft_ranks"


@guarded(RANKS)
def count_ranks() -> None:
    """Note the number of ranks in each configuration: vLLM removes it from configurations of independent ranks."""
    from vllm.engine.arg_utils import EngineArgs

    takes(EngineArgs, "create_engine_config")

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            config = original(self, *args, **kwargs)
            try:
                parallel = config.parallel_config
                if parallel.data_parallel_size_local > 1:
                    vars(parallel)[_RANKS] = parallel.data_parallel_size_local
            except Exception as error:  # Each rank then assumes that it is alone.
                failed(RANKS, error)
            return config

        return create_engine_config

    replace((EngineArgs, "create_engine_config", wrap))


def ranks_of(vllm_config: VllmConfig) -> int:
    """Number of data-parallel ranks of this vLLM on this machine; 1 if each rank was started by itself."""
    parallel = vllm_config.parallel_config
    return max(getattr(parallel, _RANKS, 1), getattr(parallel, "data_parallel_size_local", 1))
