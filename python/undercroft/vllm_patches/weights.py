"""The patch that tells undercroft when vLLM's weights stay or may change: undercroft's resets depend on this."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from undercroft.vllm_patches.checks import sets, takes
from undercroft.vllm_patches.table import WEIGHT_CHANGES, failed, guarded, replace


@guarded(WEIGHT_CHANGES)
def watch_weights(ours_in: Callable[[Any], Iterable[Any]]) -> None:
    """Tell each of undercroft's connectors of sleep, of calls that may change weights, and of resets without the
    connector. ``ours_in`` finds undercroft's connectors in a scheduler's connector."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    takes(Scheduler, "reset_prefix_cache", "reset_running_requests", "reset_connector")
    takes(EngineCore, "sleep", "level")
    takes(EngineCore, "collective_rpc", "method")
    takes(EngineCore, "is_scheduler_paused")
    takes(EngineCoreProc, "pause_scheduler")
    sets(EngineCore, "scheduler")

    def tell(scheduler: Any, hook: str, *args: Any) -> None:
        try:
            for one in ours_in(scheduler.connector):
                getattr(one, hook)(*args)
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
        def collective_rpc(self: Any, *args: Any, **kwargs: Any) -> Any:
            # vLLM itself calls this before it has a scheduler.
            if (scheduler := getattr(self, "scheduler", None)) is not None:
                tell(scheduler, "weights_may_change", self.is_scheduler_paused())
            return original(self, *args, **kwargs)

        return collective_rpc

    replace(
        (Scheduler, "reset_prefix_cache", wrap_reset),
        (EngineCore, "sleep", wrap_sleep),
        (EngineCore, "collective_rpc", wrap_rpc),
    )
