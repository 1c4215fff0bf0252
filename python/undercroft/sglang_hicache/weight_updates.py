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
    "begin_weight_update",
    "end_weight_update",
    "update_weights_from_disk",
    "receive_weights_from_distributed",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""The methods of SGLang 0.5.23 that write into a model's weights, of the target and of draft models, or between which
others may."""
_AT_RUNTIME = (
    "it was attached to a running server, whose weights may have changed before; start the server with "
    "--hicache-storage-backend dynamic"
)
_CHANGED = "SGLang has changed its weights since it started"
_lock = threading.Lock()


class Watcher(Protocol):
    """A back end that keeps pages of the weights as they were loaded."""

    def weights_change(self) -> None:
        """Called before the first change, on the thread that makes it."""


class _Process:
    """SGLang's process."""

    def __init__(self) -> None:
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self.has_changed = False


_process = _Process()


def watch(watcher: Watcher, arguments: Any) -> str | None:
    """Call ``watcher.weights_change`` before the weights change.

    ``arguments``: SGLang's arguments, or None outside its server. Returns the reason, for people, if the weights are
    not certain to be those of the model's files; else None.
    """
    with _lock:
        try:
            updater = getattr(importlib.import_module(_MODULE), _CLASS)
            methods = {name: getattr(updater, name) for name in _METHODS}
        except (ImportError, AttributeError) as error:
            return f"this SGLang changes weights where undercroft cannot see it ({error}); SGLang 0.5.23 is supported"
        if _process.has_changed:
            return _CHANGED
        is_watched = all(hasattr(method, "is_undercroft") for method in methods.values())
        if not is_watched and getattr(arguments, "hicache_storage_backend", "dynamic") != "dynamic":
            return _AT_RUNTIME
        for name, method in methods.items():
            if not hasattr(method, "is_undercroft"):
                setattr(updater, name, _announced(method))
        _process.watchers.add(watcher)
        return None


def _announced(method: Any) -> Any:
    @functools.wraps(method)
    def announced(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            watchers = [] if _process.has_changed else list(_process.watchers)
            _process.has_changed = True
        for watcher in watchers:
            watcher.weights_change()
        return method(*args, **kwargs)

    announced.is_undercroft = True  # type: ignore[attr-defined]
    return announced
