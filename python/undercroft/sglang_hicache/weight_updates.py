"""Sees when SGLang changes the weights of a process that serves."""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from typing import Any, Protocol

_MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"
_CLASS = "WeightUpdater"
_METHODS = (
    "update_weights_from_disk",
    "receive_weights_from_distributed",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""The methods of SGLang 0.5.23 that write into a model's weights, of the target and of draft models."""
_lock = threading.Lock()


class Watcher(Protocol):
    """A back end that keeps pages of the weights as they are."""

    def weights_change(self) -> None:
        """Called before each change, on the thread that makes it."""


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def watch(watcher: Watcher) -> str | None:
    """Call ``watcher.weights_change`` before each change from now on. Returns the reason, for people, if this SGLang
    changes weights in another way, so that changes would not be seen; else None."""
    with _lock:
        try:
            updater = getattr(importlib.import_module(_MODULE), _CLASS)
            methods = {name: getattr(updater, name) for name in _METHODS}
        except (ImportError, AttributeError) as error:
            return f"this SGLang changes weights where undercroft cannot see it ({error}); SGLang 0.5.23 is supported"
        for name, method in methods.items():
            if not hasattr(method, "is_undercroft"):
                setattr(updater, name, _announced(method))
        _watchers.add(watcher)
        return None


def _announced(method: Any) -> Any:
    @functools.wraps(method)
    def announced(*args: Any, **kwargs: Any) -> Any:
        for watcher in list(_watchers):
            watcher.weights_change()
        return method(*args, **kwargs)

    announced.is_undercroft = True  # type: ignore[attr-defined]
    return announced
