"""The example's proxy over instances that are simulated: routes, an API key, an instance that is down, bad requests."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

EXAMPLE = Path(__file__).parents[2] / "examples/decode_first_proxy.py"
PATH = "/v1/completions"
KEY = {"authorization": "Bearer secret"}


class Instances:
    """A decode instance that rejects prompts it has not cached, and a prefill instance; either may be down."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.cached = False
        self.asked: list[tuple[str, float | None]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        if name in self.down:
            raise httpx.ConnectError("down")
        if request.headers.get("authorization") != KEY["authorization"]:
            return httpx.Response(401, json={"error": "no key"})
        if request.method == "GET":
            return httpx.Response(200, json={"instance": name})
        body = json.loads(request.content)
        self.asked.append((name, body.get("cache_hit_threshold")))
        rejected = name == "decode" and not self.cached and body["cache_hit_threshold"] > 0
        if name == "prefill":
            self.cached = True
        choice = {"finish_reason": "cache_threshold" if rejected else "stop", "text": "" if rejected else name}
        if not body.get("stream"):
            return httpx.Response(200, json={"choices": [choice]})
        text = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


@pytest.fixture
def instances() -> Instances:
    return Instances()


@pytest.fixture
def proxy(instances: Instances) -> Callable[..., TestClient]:
    spec = importlib.util.spec_from_file_location("decode_first_proxy", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(*, shared: bool = False) -> TestClient:
        router = module.Router("http://decode", "http://prefill", 0.5, shared)
        router.http = httpx.AsyncClient(transport=httpx.MockTransport(instances))
        return TestClient(module.make_app(router))

    return make


def ask(client: TestClient, *, stream: bool = False, **headers: Any) -> httpx.Response:
    return client.post(PATH, json={"prompt": "x", "stream": stream}, headers=headers or KEY)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("cached", "shared", "route"), [
    (True, False, "decode"), (False, False, "prefill"), (False, True, "prefill,decode"),
])  # fmt: skip
def test_the_proxy_routes_a_request_by_its_cached_prompt(
    proxy: Callable[..., TestClient], instances: Instances, stream: bool, cached: bool, shared: bool, route: str
) -> None:
    instances.cached = cached
    answer = ask(proxy(shared=shared), stream=stream)
    assert answer.status_code == 200 and answer.headers["x-route"] == route
    assert route.rpartition(",")[2] in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("down", ["decode", "prefill"])
def test_the_other_instance_answers_while_one_is_down(
    proxy: Callable[..., TestClient], instances: Instances, down: str, shared: bool, stream: bool
) -> None:
    instances.down = {down}
    answer = ask(proxy(shared=shared), stream=stream)
    there = "prefill" if down == "decode" else "decode"
    assert answer.status_code == 200 and answer.headers["x-route"] == there and there in answer.text
    assert instances.asked[-1] == (there, 0), "no threshold: nobody else could answer"


def test_with_both_down_the_proxy_says_so(proxy: Callable[..., TestClient], instances: Instances) -> None:
    instances.down = {"decode", "prefill"}
    client = proxy()
    assert ask(client).status_code == 502
    assert "no instance answers" in ask(client).json()["error"]["message"]
    assert client.get("/health").status_code == 502


def test_the_api_key_is_passed_on(proxy: Callable[..., TestClient]) -> None:
    client = proxy()
    assert ask(client).status_code == 200
    assert ask(client, authorization="Bearer wrong").status_code == 401


@pytest.mark.parametrize("body", [b"{", b"[]", b""])
def test_a_body_that_is_no_object_is_a_bad_request(proxy: Callable[..., TestClient], body: bytes) -> None:
    assert proxy().post(PATH, content=body, headers=KEY).status_code == 400


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_models_and_health_are_those_of_an_instance(
    proxy: Callable[..., TestClient], instances: Instances, path: str
) -> None:
    client = proxy()
    assert client.get(path, headers=KEY).json() == {"instance": "decode"}
    instances.down = {"decode"}
    assert client.get(path, headers=KEY).json() == {"instance": "prefill"}
