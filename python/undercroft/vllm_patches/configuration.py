"""The patch that ends vLLM's start before the model is loaded if undercroft's options have a mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from undercroft.errors import UndercroftError
from undercroft.vllm_patches.checks import takes
from undercroft.vllm_patches.table import CONFIGURATION, failed, guarded, replace

_MODULE = "vllm.engine.arg_utils"


def check_configuration(check: Callable[[Any, bool], None]) -> bool:
    """Call ``check(kv_transfer_config, local)`` before vLLM makes a configuration. Patches each process once.

    ``local``: whether this machine runs engines. An `UndercroftError` ends the start; any other error is logged. In
    processes without `EngineArgs`, such as workers, this imports nothing and changes nothing.
    """
    return _MODULE in sys.modules and _wrap(check)


@guarded(CONFIGURATION)
def _wrap(check: Callable[[Any, bool], None]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    takes(EngineArgs, "create_engine_config")

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if (transfer := self.kv_transfer_config) is not None:
                    check(transfer, getattr(self, "data_parallel_size_local", None) != 0)
            except UndercroftError:
                raise
            except Exception as error:  # The connector checks its options again.
                failed(CONFIGURATION, error)
            return original(self, *args, **kwargs)

        return create_engine_config

    replace((EngineArgs, "create_engine_config", wrap))
