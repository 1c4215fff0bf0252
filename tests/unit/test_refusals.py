"""The answer "error" to a rejected request: what it says, and when a response can still become one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from undercroft.threshold.params import InvalidThresholdError, answer_of_request
from undercroft.vllm_patches import refusals
from undercroft.vllm_patches.refusals import Exchange, Refusals, choose_answer, refuse, wrap_add_request

FIGURES = {"hit_rate": 0.285396, "threshold": 0.33, "source": "request"}
START = {"type": "http.response.start", "status": 200, "headers": []}


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    monkeypatch.setattr(refusals.Configured, "answer", "error")
    yield lambda answer: monkeypatch.setattr(refusals.Configured, "answer", answer)


def body(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def serve(app: Any, path: str = "/v1/completions") -> list[dict[str, Any]]:
    """The messages that a client gets from an application behind the middleware; the client never leaves."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        await asyncio.wait_for(Refusals(app)({"type": "http", "path": path}, receive, send), 10)

    asyncio.run(run())
    return sent


def an_engine_request(name: str = "r") -> Any:
    """The state of a request that the engine gets on behalf of the current HTTP request."""
    processor = SimpleNamespace(request_states={})

    def original(processor: Any, request: Any) -> None:
        processor.request_states[request.request_id] = SimpleNamespace()

    wrap_add_request(original)(processor, SimpleNamespace(request_id=name))
    return processor.request_states[name]


def reject(state: Any) -> None:
    refuse(state, {"cache_threshold": FIGURES})


def test_a_stream_that_has_not_begun_becomes_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        reject(an_engine_request())
        await send(body('data: {"choices": []}\n\n'))
        await send(body("data: [DONE]\n\n", more=False))

    start, end = serve(app)
    assert (start["status"], dict(start["headers"])[b"content-type"]) == (412, b"application/json")
    assert int(dict(start["headers"])[b"content-length"]) == len(end["body"])
    error = json.loads(end["body"])["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "cache_threshold",
        "cache_threshold",
        "cache_hit_threshold",
    )
    assert error["cache_threshold"] == FIGURES
    assert "another instance" in error["message"] and "(29%) for cache_hit_threshold = 0.33" in error["message"]


def test_an_error_without_figures_names_none() -> None:
    error = refusals.error_object({"threshold": 0.33, "source": "global"})
    assert "cached here for cache_hit_threshold = 0.33" in error["message"]


def test_a_stream_that_has_begun_continues() -> None:
    messages = [START, body("data: 1\n\n"), body("data: [DONE]\n\n", more=False)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages[:2]:
            await send(message)
        reject(an_engine_request())
        await send(messages[2])

    assert serve(app) == messages


def test_a_stream_that_only_a_comment_has_opened_gets_the_error_as_an_event() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(body(": keep-alive\n\n"))
        reject(an_engine_request())
        await send(body("data: 1\n\n", more=False))

    start, comment, end = serve(app)
    assert (start["status"], comment["body"]) == (200, b": keep-alive\n\n")
    event, done, rest = end["body"].decode().split("\n\n")
    assert (done, rest, end.get("more_body", False)) == ("data: [DONE]", "", False)
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "cache_threshold"


@pytest.mark.parametrize("other_comes_late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_rest_of_a_batch_ends_as_if_the_client_had_left(stream: bool, other_comes_late: bool) -> None:
    """Otherwise the engine would compute the other prompts for nobody."""
    heard = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if stream:
            await send(START)
        leaving = asyncio.create_task(receive())
        await asyncio.sleep(0)  # The task waits for the client now.
        first = an_engine_request()
        if other_comes_late:
            reject(first)
            an_engine_request("other")
        else:
            an_engine_request("other")
            reject(first)
        heard.append(await leaving)
        heard.append(await receive())

    start, _ = serve(app)
    assert start["status"] == 412
    assert heard == [{"type": "http.disconnect"}] * 2


def test_of_one_prompt_nothing_is_ended() -> None:
    """vLLM would count the end of such a request twice, and log that the client had left."""
    left: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        listening = asyncio.create_task(receive())
        await asyncio.sleep(0)
        reject(an_engine_request())
        later = asyncio.create_task(receive())
        for _ in range(10):
            await asyncio.sleep(0)
        left.extend([listening.done(), later.done()])
        await send(START)
        await send(body("{}", more=False))

    start, _ = serve(app)
    assert (start["status"], left) == (412, [False, False])


def test_an_answer_is_held_back_only_where_it_may_become_an_error(configured: Callable[[str], None]) -> None:
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        choose_answer(scope["own"])
        await send(START)
        sent.append(len(got))
        await send(body("data: 1\n\n", more=False))

    for answer, own, expected in [
        ("finish_reason", None, 1),
        ("error", "finish_reason", 1),
        ("finish_reason", "error", 0),
    ]:
        configured(answer)
        got: list[Any] = []

        async def send(message: Any, got: list[Any] = got) -> None:
            got.append(message)

        scope = {"type": "http", "path": "/v1/chat/completions", "own": own}
        asyncio.run(Refusals(app)(scope, None, send))
        assert got == [START, body("data: 1\n\n", more=False)]
        assert sent.pop() == expected, (answer, own)


def test_with_the_finish_reason_as_answer_nothing_changes(configured: Callable[[str], None]) -> None:
    configured("finish_reason")
    messages = [START, body("{}", more=False)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reject(an_engine_request())
        for message in messages:
            await send(message)

    assert serve(app) == messages


def test_other_endpoints_and_requests_without_http_have_no_exchange() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert receive is not None and not isinstance(getattr(receive, "__self__", None), Exchange)
        state = an_engine_request()
        reject(state)
        assert vars(state) == {}
        await send(START)

    assert serve(app, "/v1/responses") == [START]
    reject(an_engine_request())


def test_where_a_request_may_choose_its_answer() -> None:
    assert answer_of_request(None) is None
    assert answer_of_request({"cache_hit_threshold_answer": None, "kv_transfer_params": {}}) is None
    assert answer_of_request({"kv_transfer_params": {"cache_hit_threshold_answer": "error"}}) == "error"
    both = {
        "cache_hit_threshold_answer": "finish_reason",
        "kv_transfer_params": {"cache_hit_threshold_answer": "error"},
    }
    assert answer_of_request(both) == "finish_reason"


@pytest.mark.parametrize("value", ["eror", "412", 412, True, [], {}])
def test_an_impossible_answer_is_named(value: Any) -> None:
    with pytest.raises(InvalidThresholdError) as caught:
        answer_of_request({"kv_transfer_params": {"cache_hit_threshold_answer": value}})
    assert f"kv_transfer_params.cache_hit_threshold_answer = {value!r}: " in str(caught.value)
    assert 'Allowed: "finish_reason" or "error".' in str(caught.value)
    assert ("did you mean 'error'?" in str(caught.value)) == (value == "eror")
    assert caught.value.name == "cache_hit_threshold_answer"
