"""The patches that end copies before vLLM frees the device's memory, and unpin the arena before a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from undercroft.vllm_patches.checks import takes
from undercroft.vllm_patches.table import WORKER_CHECKPOINT, WORKER_SLEEP, Patch, failed, guarded, replace

_OursIn = Callable[[Any], Iterable[Any]]
"""Finds undercroft's connectors in a worker's connector."""


def _teller(patch: Patch, ours: Callable[[], Iterable[Any]]) -> Callable[[str], None]:
    """A function that calls a method of each of undercroft's connectors, which ``ours`` finds."""

    def tell(hook: str) -> None:
        try:
            for one in ours():
                getattr(one, hook)()
        except Exception as error:  # vLLM's own call proceeds in any case.
            failed(patch, error)

    return tell


@guarded(WORKER_SLEEP)
def end_copies_before_sleep(ours_in: _OursIn) -> None:
    """Call each of undercroft's connectors before sleep or a release of the KV cache's memory, and after wake-up.

    A vLLM that itself calls connectors then is not changed.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.worker.gpu_worker import Worker

    tell = _teller(WORKER_SLEEP, lambda: ours_in(get_kv_transfer_group()) if has_kv_transfer_group() else ())
    takes(Worker, "sleep", "level")
    takes(Worker, "wake_up", "tags")

    def wrap_sleep(original: Callable[..., Any]) -> Callable[..., Any]:
        def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
            tell("unregister_kv_caches")
            return original(self, *args, **kwargs)

        return sleep

    def wrap_wake_up(original: Callable[..., Any]) -> Callable[..., Any]:
        def wake_up(self: Any, tags: list[str] | None = None, **kwargs: Any) -> Any:
            # Afterwards, because the memory of the KV cache is mapped only then.
            woken = original(self, tags, **kwargs)
            if tags is None or "kv_cache" in tags:
                tell("restore_kv_caches")
            return woken

        return wake_up

    def wrap_discard(original: Callable[..., Any]) -> Callable[..., Any]:
        def discard(self: Any, tags: tuple[str, ...], **kwargs: Any) -> Any:
            if "kv_cache" in tags:
                tell("unregister_kv_caches")
            return original(self, tags, **kwargs)

        return discard

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (Worker, "sleep", wrap_sleep),
        (Worker, "wake_up", wrap_wake_up),
    ]
    # vLLM 0.31 cannot release the cache's memory alone.
    if hasattr(Worker, "discard"):
        takes(Worker, "discard", "tags")
        replacements.append((Worker, "discard", wrap_discard))
    replace(*replacements)


@guarded(WORKER_CHECKPOINT)
def leave_device_before_checkpoint(ours_in: _OursIn) -> None:
    """Call each of undercroft's connectors before vLLM lets a tool suspend the device (``checkpoint_prepare``)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.worker.gpu_worker import Worker

    if not hasattr(Worker, "checkpoint_prepare"):
        return
    tell = _teller(WORKER_CHECKPOINT, lambda: ours_in(get_kv_transfer_group()) if has_kv_transfer_group() else ())
    takes(Worker, "checkpoint_prepare")

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint_prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
            tell("release_pinned_memory")
            return original(self, *args, **kwargs)

        return checkpoint_prepare

    replace((Worker, "checkpoint_prepare", wrap))
