"""Methods that vLLM or SGLang calls, and that let no error out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class _Reports(Protocol):
    def _report(self, hook: str, error: Exception) -> None: ...


def fail_open(default: Callable[[], Any]) -> Callable[[_Hook], _Hook]:
    """Wrap a hook: an error goes to the object's ``_report``, and the hook returns ``default()``, which is safe for
    the caller."""
    return fail_open_with(lambda *_, **__: default())


def fail_open_with(answer: Callable[..., Any]) -> Callable[[_Hook], _Hook]:
    """Like `fail_open`, for a safe answer that depends on the hook's arguments."""

    def wrap(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def guarded(self: _Reports, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                self._report(hook.__name__, error)
                return answer(*args, **kwargs)

        return cast("_Hook", guarded)

    return wrap


def nothing() -> None:
    """The default of a hook without an answer."""
