"""Requests that the hit threshold never rejects, because their answers cannot report a rejection.

In vLLM's HTTP server, only `ENDPOINTS` report the engine's finish reason unchanged. A beam search sends a request for
each token, and fails if a request returns no token.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from undercroft.threshold.params import ALLOWED, ANSWER, ERROR, FINISH_REASON, NAME
from undercroft.vllm_patches.checks import needs, takes
from undercroft.vllm_patches.refusals import ENDPOINTS, Refusals, wrap_add_request
from undercroft.vllm_patches.table import THRESHOLD_ENDPOINTS, failed, guarded, replace

SCHEMAS = {
    NAME: {
        "title": "Cache Hit Threshold",
        "description": f"Share of the prompt that must be cached for the request to be served: {ALLOWED}. With less "
        'the request ends at once with the finish reason "cache_threshold".',
        "anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}],
    },
    ANSWER: {
        "title": "Cache Hit Threshold Answer",
        "description": "Answer to a request below its threshold: a success with the finish reason, or HTTP 412 with an "
        "error object.",
        "anyOf": [{"type": "string", "enum": [FINISH_REASON, ERROR]}, {"type": "null"}],
    },
}
"""The request parameters in the server's OpenAPI document."""

_APP = "vllm.entrypoints.launchers.app"
_exempt: ContextVar[bool] = ContextVar("undercroft_exempt", default=False)


def is_exempt() -> bool:
    """Whether the current code runs on behalf of a request that must not be rejected."""
    return _exempt.get()


@contextmanager
def _exempting() -> Iterator[None]:
    token = _exempt.set(True)
    try:
        yield
    finally:
        _exempt.reset(token)


class ExemptEndpoints:
    """ASGI middleware: requests to endpoints that cannot report the finish reason are exempt."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request or connection."""
        if scope["type"] not in ("http", "websocket") or scope["path"].endswith(ENDPOINTS):
            await self._app(scope, receive, send)
            return
        with _exempting():
            await self._app(scope, receive, send)


@guarded(THRESHOLD_ENDPOINTS)
def exempt_requests() -> None:
    """Exempt beam searches, and, if this process has loaded the HTTP server, the requests to other endpoints.

    The server's other endpoints then can answer with an error.
    """
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    takes(BeamSearchOfflineMixin, "beam_search")
    takes(BeamSearchOnlineMixin, "beam_search")
    takes(OutputProcessor, "add_request", "request")
    places: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (BeamSearchOfflineMixin, "beam_search", wrap_function),
        (BeamSearchOnlineMixin, "beam_search", wrap_generator),
        (OutputProcessor, "add_request", wrap_add_request),
    ]
    if (app := sys.modules.get(_APP)) is not None:
        takes(app, "init_entrypoints_middleware", "args", "app")
        places.append((app, "init_entrypoints_middleware", wrap_init_middleware))
        _know_parameter(CompletionRequest, ChatCompletionRequest)
    replace(*places)


def wrap_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its requests are exempt."""

    def exempting(*args: Any, **kwargs: Any) -> Any:
        with _exempting():
            return original(*args, **kwargs)

    return exempting


def wrap_generator(original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Wrap an asynchronous generator so that its own requests are exempt. Requests of the iterating code are not."""

    async def exempting(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        generator: Any = original(*args, **kwargs)
        try:
            while True:
                with _exempting():
                    try:
                        item = await anext(generator)
                    except StopAsyncIteration:
                        return
                yield item
        finally:
            await generator.aclose()

    return exempting


def wrap_init_middleware(original: Callable[..., None]) -> Callable[..., None]:
    """``init_entrypoints_middleware`` that adds `ExemptEndpoints` and `Refusals`, and documents the parameters."""

    def init_entrypoints_middleware(args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
        original(args, app, *rest, **kwargs)
        try:
            from starlette.middleware import Middleware

            app.openapi = _documented(app.openapi)
            app.add_middleware(ExemptEndpoints)
            # The innermost, so that all others see the status: vLLM's metrics and logs among them.
            app.user_middleware.append(Middleware(Refusals))
        except Exception as error:
            failed(THRESHOLD_ENDPOINTS, error)

    return init_entrypoints_middleware


def _documented(original: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def openapi() -> dict[str, Any]:
        document = original()
        schemas = document.get("components", {}).get("schemas", {})
        for name in ("CompletionRequest", "ChatCompletionRequest"):
            if name in schemas:
                schemas[name]["properties"] = SCHEMAS | schemas[name]["properties"]
        return document

    return openapi


def _know_parameter(*protocols: Any) -> None:
    """Declare the parameters, so that vLLM's debug log does not report them as ignored."""
    for protocol in protocols:
        needs(hasattr(protocol, "field_names"), f"{protocol.__name__} has no field_names")
        known = protocol.__dict__.get("field_names")
        if known is None:
            fields = protocol.model_fields.items()
            known = {name for name, _ in fields} | {field.alias for _, field in fields if field.alias}
        protocol.field_names = known | SCHEMAS.keys()
