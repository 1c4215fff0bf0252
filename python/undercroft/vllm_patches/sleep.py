"""The patch that ends copies before vLLM frees the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from undercroft.vllm_patches.checks import takes
from undercroft.vllm_patches.table import WORKER_SLEEP, failed, guarded, replace


@guarded(WORKER_SLEEP)
def end_copies_before_sleep(ours_in: Callable[[Any], Iterable[Any]]) -> None:
    """Call each of undercroft's connectors before sleep and after wake-up. ``ours_in`` finds them in a worker's.

    A vLLM that itself calls connectors then is not changed.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.worker.gpu_worker import Worker

    takes(Worker, "sleep", "level")
    takes(Worker, "wake_up", "tags")

    def tell(hook: str) -> None:
        try:
            if has_kv_transfer_group():
                for one in ours_in(get_kv_transfer_group()):
                    getattr(one, hook)()
        except Exception as error:  # vLLM's own call proceeds in any case.
            failed(WORKER_SLEEP, error)

    def wrap_sleep(original: Callable[..., Any]) -> Callable[..., Any]:
        def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
            tell("unregister_kv_caches")
            return original(self, *args, **kwargs)

        return sleep

    def wrap_wake_up(original: Callable[..., Any]) -> Callable[..., Any]:
        def wake_up(self: Any, tags: list[str] | None = None, **kwargs: Any) -> Any:
            woken = original(self, tags, **kwargs)
            if tags is None or "kv_cache" in tags:
                tell("restore_kv_caches")
            return woken

        return wake_up

    replace((Worker, "sleep", wrap_sleep), (Worker, "wake_up", wrap_wake_up))
