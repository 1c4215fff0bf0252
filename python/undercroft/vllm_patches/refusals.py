"""The answer "error" to a request that the hit threshold rejects: an HTTP status and an error object.

A stream's status is sent before the engine has seen the request. So `Refusals` holds back the start of the response
until its first part, and sends an error instead if the request has been rejected by then.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from undercroft.threshold.params import ERROR, FINISH_REASON, NAME

STATUS = 412
"""Precondition Failed. The server is well, and would answer the same if it were asked again, so no 5xx: clients and
gateways repeat such requests, and take servers that answer so out of service."""
CODE = "cache_threshold"
ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/inference/v1/generate",
    "/invocations",
)
"""The endpoints whose answers report a rejection. ``/invocations`` passes requests to the first two."""

_EXCHANGE = "_undercroft_exchange"
"""Attribute of vLLM's `RequestState`: the `Exchange` that its output goes to."""
_current: ContextVar[Exchange | None] = ContextVar("undercroft_exchange", default=None)


class Configured:
    """The option ``cache_hit_threshold_answer`` of this process's frontend."""

    answer = FINISH_REASON


class Exchange:
    """One HTTP request and its response, which becomes an error if the request is rejected before the response begins.

    Only one event loop uses it: that of the HTTP server, which is the frontend's.
    """

    def __init__(self, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        self.answer = Configured.answer
        """The answer to a rejection."""
        self._receive, self._send = receive, send
        self._listening: Any = None
        self._start: Any = None
        self._has_status = self._has_begun = False
        self._refusal: dict[str, Any] | None = None
        self._parts = 0

    def add_part(self) -> None:
        """The engine gets a request for a prompt, or a sample, of the HTTP request."""
        self._parts += 1
        self._end_rest()

    def refuse(self, figures: dict[str, Any]) -> None:
        """Answer with an error, unless a part of the answer has been sent."""
        if self.answer == ERROR and not self._has_begun and self._refusal is None:
            self._refusal = figures
            self._end_rest()

    async def receive(self) -> Any:
        """The next message of the client, which seems to leave when there is a rest to end."""
        from anyio import CancelScope

        if not self._has_rest():
            with CancelScope() as self._listening:
                return await self._receive()
        return {"type": "http.disconnect"}

    def _end_rest(self) -> None:
        """Let the server end the other parts of a refused HTTP request. Of one part, nothing is left to end."""
        if self._has_rest() and self._listening is not None:
            self._listening.cancel()

    def _has_rest(self) -> bool:
        return self._refusal is not None and self._parts > 1

    async def send(self, message: Any) -> None:
        """Send a message of the server, or hold it back."""
        if self._refusal is not None:
            return
        if message["type"] == "http.response.start" and self.answer == ERROR:
            self._start = message
            return
        start, self._start = self._start, None
        self._has_status = True
        # A comment only keeps the connection open (``--sse-keep-alive-interval``).
        self._has_begun = self._has_begun or not message.get("body", b":").startswith(b":")
        if start is not None:
            await self._send(start)
        await self._send(message)

    async def finish(self) -> None:
        """Send the error, if the request is refused. The server has ended its own answer."""
        if self._refusal is None:
            return
        error = json.dumps({"error": error_object(self._refusal)})
        if self._has_status:
            event = f"data: {error}\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": event.encode()})
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(error)).encode())]
        await self._send({"type": "http.response.start", "status": STATUS, "headers": headers})
        await self._send({"type": "http.response.body", "body": error.encode()})


class Refusals:
    """ASGI middleware: answers a rejected request with an error if this is its answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request or connection."""
        if scope["type"] != "http" or not scope["path"].endswith(ENDPOINTS):
            await self._app(scope, receive, send)
            return
        exchange = Exchange(receive, send)
        token = _current.set(exchange)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            _current.reset(token)
        await exchange.finish()


def choose_answer(own: str | None) -> None:
    """The current HTTP request's own answer; None: the configured one holds."""
    exchange = _current.get()
    if exchange is not None:
        exchange.answer = own or Configured.answer


def refuse(state: Any, kv_transfer_params: dict[str, Any] | None) -> None:
    """A request has been rejected before its first token. ``state``: its `RequestState`."""
    exchange = state.__dict__.get(_EXCHANGE)
    if exchange is not None:
        exchange.refuse((kv_transfer_params or {}).get(CODE) or {})


def wrap_add_request(original: Callable[..., None]) -> Callable[..., None]:
    """``OutputProcessor.add_request`` that notes the HTTP request from which a request comes."""

    def add_request(processor: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(processor, request, *args, **kwargs)
        exchange = _current.get()
        if exchange is not None and (state := processor.request_states.get(request.request_id)) is not None:
            state.__dict__[_EXCHANGE] = exchange
            exchange.add_part()

    return add_request


def error_object(figures: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's error object for a rejected request. ``figures``: as in the ``kv_transfer_params`` of an answer."""
    rate = f" ({figures['hit_rate']:.0%})" if "hit_rate" in figures else ""
    message = (
        f"Too little of the prompt is cached here{rate} for {NAME} = {figures.get('threshold', 'the configured one')}, "
        "so nothing was computed. Send the request to another instance. To have it computed here, send it with "
        f'{NAME} = 0, which the operator must allow (client_fields has "threshold").'
    )
    return {"message": message, "type": CODE, "param": NAME, "code": CODE, CODE: figures}
