"""The hit threshold over HTTP, against a real server with its own processes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from real_engine import prompt
from threshold_http import REASON, Client, output, start_server, the_choice

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "decode_first_proxy.py"
GLOBAL = 0.8
REJECTED = "vllm:undercroft_rejected_requests_total"
WHOLE = prompt(897)
HALF = WHOLE[:448] + prompt(449, seed=5)
FIFTH = WHOLE[:179] + prompt(718, seed=6)
OTHER = prompt(897, seed=9)


@pytest.fixture(scope="module")
def client(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    sizes = ["--max-num-seqs", "32", "--num-gpu-blocks-override", "512", "--enable-scale-out"]
    options = {"cache_hit_threshold": GLOBAL, "host_memory": "256MiB"}
    with start_server(llama_with_tokenizer, log, options, *sizes) as client:
        yield client


@pytest.fixture
def fresh(client: Client) -> Client:
    client.reset()
    return client


def assert_rejected(answer: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """Check a response of which every choice was rejected; returns its measurements."""
    for choice in answer["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == (REASON, None)
        assert choice.get("text", "") == ""
        assert choice.get("token_ids") in ([], None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 0)
    return answer["kv_transfer_params"]["cache_threshold"]


def test_walk(fresh: Client) -> None:
    reference = the_choice(fresh.complete(HALF, cache_hit_threshold=0))["token_ids"]
    fresh.reset()
    stopped = fresh.metric("vllm:request_success_total", finished_reason="stop")
    rejected = [fresh.metric(REJECTED, source=source) for source in ("request", "global")]
    first = fresh.complete(WHOLE, cache_hit_threshold=0)
    assert the_choice(first)["finish_reason"] == "length"
    fresh.reset_device()
    measured = assert_rejected(fresh.complete(FIFTH, cache_hit_threshold=0.33), 897)
    assert measured["hit_rate"] == pytest.approx(128 / 897, abs=1e-6)
    assert (measured["local_tokens"], measured["external_tokens"]) == (0, 128)
    third = fresh.complete(HALF, cache_hit_threshold=0.33)
    assert the_choice(third)["token_ids"] == reference
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
    measured = assert_rejected(fresh.complete(OTHER), 897)
    assert (measured["source"], measured["threshold"], measured["hit_rate"]) == ("global", GLOBAL, 0)
    assert fresh.metric("vllm:request_success_total", finished_reason="stop") == stopped
    now = [fresh.metric(REJECTED, source=source) for source in ("request", "global")]
    assert [after - before for after, before in zip(now, rejected, strict=True)] == [1, 1]
    log = fresh.server.log.read_text()
    assert re.search(r"Request cmpl-\S+ rejected: cache hit rate 0\.14 < threshold 0\.33 \(request\)", log)
    assert re.search(r"Request cmpl-\S+ rejected: cache hit rate 0\.00 < threshold 0\.8 \(global\)", log)


def test_kv_transfer_params_carry_it_too(fresh: Client) -> None:
    assert_rejected(fresh.complete(WHOLE, kv_transfer_params={"cache_hit_threshold": 0.33}), 897)
    answer = fresh.complete(WHOLE, kv_transfer_params={"cache_hit_threshold": 0.33}, cache_hit_threshold=0)
    assert the_choice(answer)["finish_reason"] == "length"


def test_streamed_completion(fresh: Client) -> None:
    body = {"prompt": WHOLE, "max_tokens": 4, "cache_hit_threshold": 0.33}
    final, usage = fresh.events("/v1/completions", body)
    choice = the_choice(final)
    assert (choice["text"], choice["finish_reason"]) == ("", REASON)
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (897, 0)
    served = fresh.events("/v1/completions", body | {"cache_hit_threshold": 0})
    assert served[-2]["choices"][0]["finish_reason"] == "length"


def test_streamed_completion_with_token_ids_logprobs_and_samples(fresh: Client) -> None:
    body = {"prompt": WHOLE, "max_tokens": 4, "n": 2, "logprobs": 1, "return_token_ids": True, "temperature": 1}
    events = fresh.events("/v1/completions", body | {"cache_hit_threshold": 0.33})
    ends = [event["choices"][0] for event in events if event["choices"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1]
    assert {choice["finish_reason"] for choice in ends} == {REASON}
    assert [choice["token_ids"] for choice in ends] == [[], []]
    assert events[-1]["usage"]["completion_tokens"] == 0


def test_chat(fresh: Client) -> None:
    text = "a long conversation about caches " * 20
    answer = fresh.chat(text, cache_hit_threshold=0.33).json()
    choice = the_choice(answer)
    assert (choice["finish_reason"], choice["message"]["content"]) == (REASON, "")
    assert answer["usage"]["completion_tokens"] == 0
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert prompt_tokens > 128
    assert answer["kv_transfer_params"]["cache_threshold"]["required_tokens"] == prompt_tokens
    assert the_choice(fresh.chat(text, cache_hit_threshold=0).json())["finish_reason"] == "length"
    assert the_choice(fresh.chat(text, cache_hit_threshold=0.33).json())["finish_reason"] == "length"


def test_streamed_chat(fresh: Client) -> None:
    body = {"messages": [{"role": "user", "content": "tell me " * 100}], "max_tokens": 4, "cache_hit_threshold": 0.5}
    events = fresh.events("/v1/chat/completions", body)
    role, final, usage = events
    assert the_choice(role)["delta"]["role"] == "assistant"
    assert (the_choice(final)["finish_reason"], the_choice(final)["delta"].get("content", "")) == (REASON, "")
    assert usage["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_choose_an_error_as_its_answer(fresh: Client, stream: bool, path: str, nested: bool) -> None:
    own: dict[str, Any] = {"cache_hit_threshold_answer": "error"}
    said = {"prompt": OTHER} if path == "/v1/completions" else {"messages": CHAT}
    answer = fresh.raw({"stream": stream} | said | ({"kv_transfer_params": own} if nested else own), path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (412, REASON)


def test_samples_and_batches(fresh: Client) -> None:
    answer = fresh.complete(WHOLE, n=2, temperature=1, cache_hit_threshold=0.33)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert_rejected(answer, 897)
    fresh.complete(WHOLE, cache_hit_threshold=0)
    answer = fresh.complete([OTHER, HALF, FIFTH, WHOLE], cache_hit_threshold=0.4)
    assert [choice["finish_reason"] for choice in answer["choices"]] == [REASON, "length", REASON, "length"]
    assert answer["usage"]["completion_tokens"] == 8


TEXT = "every protocol has its own way to say why an answer ends " * 12
CHAT = [{"role": "user", "content": TEXT}]
EXEMPT = {
    "beams": ("/v1/completions", {"prompt": WHOLE, "max_tokens": 4, "use_beam_search": True, "n": 2}),
    "chat beams": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "use_beam_search": True, "n": 2}),
    "scores": ("/generative_scoring", {"query": TEXT, "items": ["one", "two"], "label_token_ids": [5, 6]}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 4}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
}
"""Endpoints whose answers cannot say that a request was rejected."""


@pytest.mark.parametrize("own", [{}, {"kv_transfer_params": {"cache_hit_threshold": 0.9}}], ids=["global", "own"])
@pytest.mark.parametrize("name", EXEMPT)
def test_other_protocols_answer_as_without_a_threshold(fresh: Client, name: str, own: dict[str, Any]) -> None:
    path, body = EXEMPT[name]
    answer = fresh.raw(body | own, path)
    assert answer.status_code == 200, answer.text + fresh.server.log_tail()
    answer = answer.json()
    rejected = fresh.metric(REJECTED)
    if "beams" in name:
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
        assert answer["usage"]["completion_tokens"] > 0
    elif name == "scores":
        assert [0 <= item["score"] <= 1 for item in answer["data"]] == [True, True]
    elif name == "responses":
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert answer["output"][0]["content"][0]["text"]
    else:
        assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 4)
        assert answer["content"][0]["text"]
    # The cache was not why they were served: the same prompt is rejected where it can be.
    assert fresh.metric(REJECTED) == rejected
    assert_rejected(fresh.complete(OTHER), 897)


def test_streams_of_other_protocols_end_as_without_a_threshold(fresh: Client) -> None:
    responses = fresh.raw(EXEMPT["responses"][1] | {"stream": True}, "/v1/responses").text
    assert "response.incomplete" in responses or '"status":"incomplete"' in responses.replace(" ", "")
    assert "response.output_text.delta" in responses
    messages = fresh.raw(EXEMPT["messages"][1] | {"stream": True}, "/v1/messages").text
    assert '"stop_reason":"max_tokens"' in messages.replace(" ", "")


def test_decisions_are_made_without_a_cached_prompt(fresh: Client) -> None:
    question = {"type": "yes_no", "instructions": "is it cached?"}
    answer = fresh.raw({"state": TEXT, "questions": {"q": question}}, "/v1/systemone")
    assert answer.status_code != 500, answer.text
    assert "logprobs" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_tokens_out_reports_the_rejection(fresh: Client, stream: bool) -> None:
    sampling = {"max_tokens": 4, "extra_args": {"cache_hit_threshold": 0.33}}
    body = {"token_ids": WHOLE, "sampling_params": sampling, "stream": stream}
    answer = fresh.raw(body, "/inference/v1/generate")
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line and "[DONE]" not in line]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert [(choice["finish_reason"], choice["token_ids"] or []) for choice in choices] == [(REASON, [])]


def test_a_batch_of_chats_reports_each_rejection(fresh: Client) -> None:
    body = {"messages": [CHAT, [{"role": "user", "content": "tell me " * 100}]], "max_tokens": 4}
    answer = fresh.raw(body, "/v1/chat/completions/batch")
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == [REASON, REASON]


def test_the_field_is_in_the_openapi_document(client: Client) -> None:
    schemas = client.http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        field = schemas[name]["properties"]["cache_hit_threshold"]
        assert field["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1}
        assert "cache_hit_threshold" not in schemas[name].get("required", [])


@pytest.mark.parametrize("value", ["true", '"0.5"', "NaN", "Infinity", "-0.1", "1.5", "[0.5]", "{}"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_values(client: Client, value: str, nested: bool, stream: str, path: str) -> None:
    given = f'"cache_hit_threshold": {value}'
    if nested:
        given = f'"kv_transfer_params": {{{given}}}'
    what = '"prompt": "hello"' if path == "/v1/completions" else '"messages": [{"role": "user", "content": "hello"}]'
    body = f'{{"model": "m", "max_tokens": 2, "stream": {stream}, {what}, {given}}}'
    response = client.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    shown = repr(json.loads(value))
    assert f"cache_hit_threshold = {shown}:" in error["message"]
    assert re.search("from 0 .*to 1", error["message"])
    assert "cache_hit_threshold" in error["param"]


def test_null_is_as_absent(fresh: Client) -> None:
    fresh.complete(WHOLE, cache_hit_threshold=0)
    assert the_choice(fresh.complete(WHOLE, cache_hit_threshold=None))["finish_reason"] == "length"
    assert_rejected(fresh.complete(OTHER, cache_hit_threshold=None), 897)


@pytest.mark.parametrize("stream", [False, True])
def test_other_parameters_of_a_request_are_checked_before_it_starts(client: Client, stream: bool) -> None:
    bad = {"prompt": "hello", "max_tokens": 2, "stream": stream, "kv_transfer_params": {"lookup": "sometimes"}}
    response = client.raw(bad)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "kv_transfer_params.lookup = 'sometimes'" in error["message"]
    assert '"async" or "blocking"' in error["message"]
    good = client.raw(bad | {"kv_transfer_params": {"lookup": "blocking", "promotion_wait": {"base_ms": 5}}})
    assert good.status_code == 200, good.text


def test_empty_prompt_is_refused_as_without_undercroft(client: Client) -> None:
    answers = [client.raw({"prompt": [], "max_tokens": 2, "cache_hit_threshold": value}) for value in (0, 0.5)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert "cache_hit_threshold" not in answers[1].text


def test_five_hundred_at_once_leave_nothing(fresh: Client) -> None:
    fresh.complete(WHOLE, cache_hit_threshold=0)
    kinds = [(WHOLE, "length"), (FIFTH, REASON), (HALF, "length"), (OTHER, REASON)]

    def send(i: int) -> bool:
        ids, expected = kinds[i % 4]
        if i % 8 < 4:
            reason = the_choice(fresh.complete(ids, 2, cache_hit_threshold=0.4))["finish_reason"]
        else:
            body = {"prompt": ids, "max_tokens": 2, "cache_hit_threshold": 0.4}
            *_, final, _usage = fresh.events("/v1/completions", body)
            reason = the_choice(final)["finish_reason"]
        return reason == expected

    with ThreadPoolExecutor(48) as pool:
        assert all(pool.map(send, range(500)))
    assert fresh.metric("vllm:undercroft_hook_errors_total") == 0
    fresh.reset()


@pytest.fixture(scope="module", params=["--shared-cache", None], ids=["shared", "separate"])
def proxy(client: Client, request: pytest.FixtureRequest) -> Iterator[tuple[httpx.Client, bool]]:
    """The example's proxy, and whether it takes the cache for shared; one server is decode and prefill instance."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = client.server.url
    command = [sys.executable, str(EXAMPLE), "--decode", url, "--prefill", url, "--port", str(port)]
    command += [request.param] if request.param else []
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            wait_until_up(http, process)
            yield http, request.param is not None
    finally:
        process.terminate()
        process.wait()


def wait_until_up(http: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None, "the proxy ended"
        try:
            http.get("/")
        except httpx.ConnectError:
            time.sleep(0.1)
        else:
            return


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_decode_first_example(fresh: Client, proxy: tuple[httpx.Client, bool], path: str, stream: bool) -> None:
    http, shared = proxy
    text = "which of these two instances has seen me before " * 10
    said = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    body = {"model": "m", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": stream} | said
    direct = fresh.http.post(path, json=body | {"cache_hit_threshold": 0})
    fresh.reset()
    served_before = fresh.metric("vllm:request_success_total")
    cold, warm = http.post(path, json=body), http.post(path, json=body)
    assert (cold.headers["x-route"], warm.headers["x-route"]) == ("prefill,decode" if shared else "prefill", "decode")
    assert output(cold.text, stream) == output(warm.text, stream) == output(direct.text, stream)
    # One for each instance on the route; a rejected request is not counted.
    assert fresh.metric("vllm:request_success_total") - served_before == (3 if shared else 2)
    own = http.post(path, json=body | {"cache_hit_threshold": 7})
    assert (own.status_code, own.headers["x-route"]) == (400, "decode")
