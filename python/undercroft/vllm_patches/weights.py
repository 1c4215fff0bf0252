"""The patch that tells undercroft when vLLM's weights stay or may change: undercroft's resets depend on this."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from undercroft.vllm_patches.checks import sets, takes
from undercroft.vllm_patches.table import WEIGHT_CHANGES, failed, guarded, replace

HARMLESS = frozenset(
    {
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_model_inspection",
        "get_supported_tasks",
        "list_loras",
        "profile",
        "release_late_interaction_query_cache",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "supports_draft_weight_updates",
        "synchronize_device",
    }
)
"""Methods of vLLM's workers that leave the weights as they are. Any other one may change them."""


@guarded(WEIGHT_CHANGES)
def watch_weights(ours_in: Callable[[Any], Iterable[Any]]) -> None:
    """Tell each of undercroft's connectors of sleep, of calls that may change weights, and of resets without the
    connector. ``ours_in`` finds undercroft's connectors in a scheduler's connector."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    takes(Scheduler, "reset_prefix_cache", "reset_running_requests", "reset_connector")
    takes(EngineCore, "sleep", "level")
    takes(EngineCore, "collective_rpc", "method")
    takes(EngineCore, "__init__", "vllm_config", "executor_class")
    takes(EngineCoreProc, "pause_scheduler")
    sets(EngineCore, "scheduler", "model_executor")

    def tell(scheduler: Any, hook: str, *args: Any) -> None:
        try:
            for one in ours_in(scheduler.connector):
                if one.resets is not None:
                    getattr(one.resets, hook)(*args)
        except Exception as error:  # vLLM's own call proceeds in any case.
            failed(WEIGHT_CHANGES, error)

    def wrap_reset(original: Callable[..., bool]) -> Callable[..., bool]:
        def reset_prefix_cache(
            self: Any, reset_running_requests: bool = False, reset_connector: bool = False, **more: Any
        ) -> bool:
            if not reset_connector:
                tell(self, "prefix_cache_is_reset")
            return original(self, reset_running_requests, reset_connector, **more)

        return reset_prefix_cache

    def wrap_sleep(original: Callable[..., Any]) -> Callable[..., Any]:
        def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
            # Only for an engine in a process of its own. Elsewhere a trainer can change weights without a call here.
            tell(self.scheduler, "sleeps", level == 1 and isinstance(self, EngineCoreProc))
            return original(self, level, *args, **kwargs)

        return sleep

    def wrap_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
        def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
            # vLLM itself calls this before it has a scheduler.
            scheduler = getattr(self, "scheduler", None)
            if scheduler is not None and not (isinstance(method, str) and method in HARMLESS):
                tell(scheduler, "weights_may_change", _name(method))
            return original(self, method, *args, **kwargs)

        return collective_rpc

    def wrap_version(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_weight_version(self: Any, weight_version: str, *args: Any, **kwargs: Any) -> Any:
            tell(self.scheduler, "weights_are_named", weight_version)
            return original(self, weight_version, *args, **kwargs)

        return set_weight_version

    def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
        return _watching_loads(tell, original)

    replace(
        (Scheduler, "reset_prefix_cache", wrap_reset),
        (EngineCore, "sleep", wrap_sleep),
        (EngineCore, "collective_rpc", wrap_rpc),
        (EngineCore, "__init__", wrap_init),
        *([(EngineCore, "set_weight_version", wrap_version)] if hasattr(EngineCore, "set_weight_version") else []),
    )


def _watching_loads(tell: Callable[..., None], original: Callable[..., None]) -> Callable[..., None]:
    """vLLM's ``EngineCore.__init__``, after which loads of weights into models of this process are told."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            for model in _models_here(self.model_executor):
                _watch_loads(model, lambda: tell(self.scheduler, "weights_may_change", "load_weights"))
        except Exception as error:  # The model is not where it was: its process has no other users then.
            failed(WEIGHT_CHANGES, error)

    return init


def _name(method: Any) -> str:
    """The name of a method, or of a function, that a caller has sent to the workers."""
    return method if isinstance(method, str) else str(getattr(method, "__qualname__", type(method).__name__))


def _models_here(executor: Any) -> list[Any]:
    """The model and the draft model, if the worker runs in the scheduler's process, where a trainer may reach them."""
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    found = (getattr(worker, name, None) for name in ("get_model", "get_draft_model"))
    return [model for get in found if get is not None and (model := get()) is not None]


def _watch_loads(model: Any, before: Callable[[], None]) -> None:
    """Call ``before`` each time that weights are loaded into ``model``."""
    original = getattr(model, "load_weights", None)
    if original is None:
        return

    @functools.wraps(original)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    model.load_weights = load_weights
