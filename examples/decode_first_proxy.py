"""Decode-first routing: ask the decode instance, and prefill elsewhere only the requests that it rejects.

Each request goes to the decode instance with a ``cache_hit_threshold``. If enough of its prompt is cached there, it is
answered at once. If not, the decode instance rejects it without having computed anything (finish reason
``cache_threshold``), and the prefill instance answers it. With ``--shared-cache``, for instances that share one
undercroft cache, the prefill instance only computes the prompt; the decode instance then loads it and answers.

The instances need undercroft's option ``"client_fields": ["threshold"]``, and no other client should reach them.

    python examples/decode_first_proxy.py --decode http://127.0.0.1:8001 --prefill http://127.0.0.1:8002

The response header ``x-route`` names the way of a request: ``decode``, ``prefill`` or ``prefill,decode``. A request
that brings its own ``cache_hit_threshold`` keeps it. The Authorization header is passed on, so that instances may have
an API key. While one instance is down, the other one answers everything. While both are, the proxy answers 502.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

THRESHOLD = "cache_hit_threshold"
REJECTED = "cache_threshold"
ROUTES = ("/v1/completions", "/v1/chat/completions")
# A model may take minutes to answer, but an instance that runs accepts a connection at once.
TIMEOUT = httpx.Timeout(None, connect=5.0)


class Router:
    """Sends requests to the two instances."""

    def __init__(self, decode: str, prefill: str, threshold: float, shared_cache: bool) -> None:
        self.decode, self.prefill, self.threshold, self.shared_cache = decode, prefill, threshold, shared_cache
        self.http = httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None))

    async def answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        """The answer of the decode instance, or of the other way if it rejects the request or cannot be reached."""
        try:
            answer = await self.open(self.decode + path, {THRESHOLD: self.threshold} | body, headers)
        except httpx.TransportError:
            return await self.relay(self.prefill + path, body | {THRESHOLD: 0}, headers, "prefill")
        events = answer.aiter_lines()
        first: list[str] = []
        if not body.get("stream"):
            await answer.aread()
            if not (answer.is_success and is_rejected(answer.json())):
                return copy(answer, "decode")
            return await self.elsewhere(path, body, headers)
        if answer.is_success:
            async for line in events:
                first.append(line)
                if (event := parse(line)) is None:
                    continue
                if is_rejected(event):
                    await answer.aclose()
                    return await self.elsewhere(path, body, headers)
                if has_output(event):
                    break
        return pass_on(answer, first, events, "decode")

    async def elsewhere(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        """The answer to a request that the decode instance has rejected."""
        unlimited = body | {THRESHOLD: 0}
        try:
            if not self.shared_cache:
                return await self.relay(self.prefill + path, unlimited, headers, "prefill")
            await self.fill(path, body, headers)
            route = "prefill,decode"
        except httpx.TransportError:
            # Without the prefill instance, the decode instance computes the prompt itself.
            route = "decode"
        return await self.relay(self.decode + path, unlimited, headers, route)

    async def relay(self, url: str, body: dict[str, Any], headers: dict[str, str], route: str) -> Response:
        """An instance's answer, as it is."""
        answer = await self.open(url, body, headers)
        if body.get("stream"):
            return pass_on(answer, [], answer.aiter_lines(), route)
        await answer.aread()
        return copy(answer, route)

    async def open(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        """A response whose body is still to be read."""
        return await self.http.send(self.http.build_request("POST", url, json=body, headers=headers), stream=True)

    async def fill(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Have the prefill instance compute the prompt into the shared cache."""
        changes = {"stream": False, "n": 1, THRESHOLD: 0, "max_tokens": 1}
        if "max_completion_tokens" in body:
            changes["max_completion_tokens"] = 1
        dropped = ("stream_options", "min_tokens", "best_of")
        prefill = {key: value for key, value in body.items() if key not in dropped} | changes
        await self.http.post(self.prefill + path, json=prefill, headers=headers)

    async def first_reachable(self, path: str, headers: dict[str, str]) -> Response:
        """The answer to a GET, of the decode instance, or else of the prefill instance."""
        try:
            return copy(await self.http.get(self.decode + path, headers=headers), "decode")
        except httpx.TransportError:
            return copy(await self.http.get(self.prefill + path, headers=headers), "prefill")


def is_rejected(answer: dict[str, Any]) -> bool:
    """Whether the instance rejected any choice of the request."""
    return any(choice.get("finish_reason") == REJECTED for choice in answer.get("choices", ()))


def has_output(event: dict[str, Any]) -> bool:
    """Whether an event of a stream holds generated output, and not only the role that begins a chat."""
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        told = (choice.get("finish_reason"), choice.get("text"), choice.get("token_ids"))
        if any(told) or any(value for key, value in delta.items() if key != "role"):
            return True
    return "error" in event


def parse(line: str) -> dict[str, Any] | None:
    """The event in a line of a stream, None if it holds none."""
    data = line.removeprefix("data: ")
    return None if data == line or data == "[DONE]" else json.loads(data)


def copy(answer: httpx.Response, route: str) -> Response:
    """An instance's whole answer, as ours."""
    return Response(answer.content, answer.status_code, {"x-route": route}, answer.headers.get("content-type"))


def pass_on(answer: httpx.Response, first: list[str], rest: AsyncIterator[str], route: str) -> StreamingResponse:
    """An instance's stream, as ours."""

    async def lines() -> AsyncIterator[str]:
        try:
            for line in first:
                yield line + "\n"
            async for line in rest:
                yield line + "\n"
        finally:  # Also when the client hangs up: the instance then aborts the request.
            await answer.aclose()

    return StreamingResponse(lines(), answer.status_code, {"x-route": route}, answer.headers.get("content-type"))


def failure(status: int, message: str) -> JSONResponse:
    """An error in the form of the OpenAI API."""
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def make_app(router: Router) -> FastAPI:
    """The proxy as an application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await router.http.aclose()

    app = FastAPI(lifespan=lifespan)

    def passed_on(request: Request) -> dict[str, str]:
        return {name: request.headers[name] for name in ("authorization", "x-request-id") if name in request.headers}

    async def serve(request: Request) -> Response:
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return failure(400, "the body is no JSON object")
        try:
            return await router.answer(request.url.path, body, passed_on(request))
        except httpx.TransportError as error:
            return failure(502, f"no instance answers: {error}")

    async def look(request: Request) -> Response:
        try:
            return await router.first_reachable(request.url.path, passed_on(request))
        except httpx.TransportError as error:
            return failure(502, f"no instance answers: {error}")

    for path in ROUTES:
        app.add_api_route(path, serve, methods=["POST"])
    for path in ("/v1/models", "/health"):
        app.add_api_route(path, look, methods=["GET"])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode-first routing between two vLLM servers with undercroft")
    parser.add_argument("--decode", required=True, metavar="URL", help="the decode instance")
    parser.add_argument("--prefill", required=True, metavar="URL", help="the prefill instance")
    parser.add_argument("--threshold", type=float, default=0.5, help="cached share that the decode instance asks for")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--shared-cache", action="store_true", help="both instances share one undercroft cache")
    arguments = parser.parse_args()
    router = Router(arguments.decode, arguments.prefill, arguments.threshold, arguments.shared_cache)
    uvicorn.run(make_app(router), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
