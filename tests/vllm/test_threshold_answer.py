"""The answer "error" over HTTP, as openai-python sees it, against a real server with its own processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from real_engine import prompt
from threshold_http import REASON, Client, start_server, the_choice

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

GLOBAL = 0.8
REJECTED = "vllm:undercroft_rejected_requests_total"
COUNTED = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count",
)
WHOLE = prompt(897)
OTHER = prompt(897, seed=9)
CHAT: Any = [{"role": "user", "content": "a long conversation about caches " * 20}]
KINDS = pytest.mark.parametrize("kind", ["completion", "chat"])
STREAM = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def client(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    sizes = ["--max-num-seqs", "32", "--num-gpu-blocks-override", "512", "--enable-scale-out"]
    options = {"cache_hit_threshold": GLOBAL, "cache_hit_threshold_answer": "error", "host_memory": "256MiB"}
    with start_server(llama_with_tokenizer, log, options, *sizes) as client:
        yield client


@pytest.fixture
def fresh(client: Client) -> Client:
    client.reset()
    return client


def ask(client: Client, kind: str, stream: bool, **fields: Any) -> Any:
    """The answer, or the chunks of a stream, of openai-python with its own retries."""
    with openai.OpenAI(base_url=client.server.url + "/v1", api_key="none") as api:
        common: dict[str, Any] = {"model": "m", "max_tokens": 4, "temperature": 0, "stream": stream}
        extra = {"ignore_eos": True} | fields
        if kind == "chat":
            answer: Any = api.chat.completions.create(messages=CHAT, extra_body=extra, **common)
        else:
            answer = api.completions.create(prompt=OTHER, extra_body=extra, **common)
        return list(answer) if stream else answer


def assert_refused(answer: Any) -> dict[str, Any]:
    """Check an HTTP response; returns its error object."""
    assert (answer.status_code, answer.headers["content-type"]) == (412, "application/json"), answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (REASON, REASON, "cache_hit_threshold")
    return error


@STREAM
@KINDS
def test_openai_python_raises_an_error_and_does_not_ask_again(fresh: Client, kind: str, stream: bool) -> None:
    before = [fresh.metric(name) for name in COUNTED]
    rejected, answered = fresh.metric(REJECTED), fresh.metric("http_requests_total", status="4xx")
    with pytest.raises(openai.APIStatusError, match="another instance") as caught:
        ask(fresh, kind, stream)
    error = caught.value
    assert (error.status_code, error.type, error.code) == (412, REASON, REASON)
    assert isinstance(error.body, dict)
    figures = error.body[REASON]
    assert (figures["threshold"], figures["source"], figures["hit_rate"]) == (GLOBAL, "global", 0)
    assert fresh.metric(REJECTED) - rejected == 1
    assert fresh.metric("http_requests_total", status="4xx") - answered == 1
    assert [fresh.metric(name) for name in COUNTED] == before
    fresh.reset()


@STREAM
@KINDS
def test_served_requests_are_answered_as_ever(fresh: Client, kind: str, stream: bool) -> None:
    for limits in ({"cache_hit_threshold": 0}, {}):
        answer = ask(fresh, kind, stream, **limits)
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        assert choices[-1].finish_reason == "length"


@STREAM
@KINDS
def test_a_request_may_choose_the_finish_reason(fresh: Client, kind: str, stream: bool) -> None:
    own = {"cache_hit_threshold_answer": "finish_reason"}
    for fields in (own, {"kv_transfer_params": own}):
        answer = ask(fresh, kind, stream, **fields)
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        assert choices[-1].finish_reason == REASON


@STREAM
@pytest.mark.parametrize("fields", [{"prompt": [OTHER, WHOLE]}, {"prompt": OTHER, "n": 3, "temperature": 1}])
def test_one_rejected_prompt_refuses_all_and_ends_the_rest(fresh: Client, fields: dict[str, Any], stream: bool) -> None:
    fresh.complete(WHOLE, cache_hit_threshold=0)
    generated = fresh.metric("vllm:generation_tokens_total")
    assert_refused(fresh.raw({"max_tokens": 1000, "stream": stream} | fields))
    fresh.reset()
    assert fresh.metric("vllm:generation_tokens_total") - generated < 500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT]}),
        ("/invocations", {"prompt": OTHER, "stream": True}),
        ("/inference/v1/generate", {"token_ids": OTHER, "sampling_params": {"max_tokens": 4}}),
        ("/inference/v1/generate", {"token_ids": OTHER, "sampling_params": {"max_tokens": 4}, "stream": True}),
    ],
)
def test_every_endpoint_with_a_threshold_answers_so(fresh: Client, path: str, body: dict[str, Any]) -> None:
    assert_refused(fresh.raw({"max_tokens": 4} | body, path))


def test_other_errors_and_endpoints_keep_their_answers(fresh: Client) -> None:
    assert fresh.raw({"prompt": OTHER, "max_tokens": -1}).status_code == 400
    answer = fresh.raw({"messages": CHAT, "max_tokens": 4}, "/v1/messages")
    assert (answer.status_code, answer.json()["stop_reason"]) == (200, "max_tokens")


@STREAM
@pytest.mark.parametrize("nested", [False, True])
@KINDS
def test_an_impossible_answer_is_refused_with_the_nearest_name(
    client: Client, kind: str, nested: bool, stream: bool
) -> None:
    own: dict[str, Any] = {"cache_hit_threshold_answer": "eror"}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, kind, stream, **({"kv_transfer_params": own} if nested else own))
    assert "cache_hit_threshold_answer = 'eror'" in caught.value.message
    assert "did you mean 'error'?" in caught.value.message
    assert caught.value.param == "cache_hit_threshold_answer"


def test_the_field_is_in_the_openapi_document(client: Client) -> None:
    schemas = client.http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        field = schemas[name]["properties"]["cache_hit_threshold_answer"]
        assert field["anyOf"][0] == {"type": "string", "enum": ["finish_reason", "error"]}


def test_litellm_raises_an_error_and_its_router_falls_back(fresh: Client) -> None:
    """`UNDERCROFT_TEST_LITELLM` is the Python of an environment with LiteLLM, which is too large for every run."""
    python = os.environ.get("UNDERCROFT_TEST_LITELLM")
    if not python:
        pytest.skip("UNDERCROFT_TEST_LITELLM is not set")
    program = Path(__file__).with_name("litellm_client.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, str(program), fresh.server.url + "/v1"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    for stream in (False, True):
        assert found[f"finish_reason {stream}"] == [200, "stop", ""], "why the answer exists"
        status, message = found[f"error {stream}"]
        assert status == 412 and "another instance" in message
        assert found[f"router {stream}"] == [200, "length"]


def test_two_hundred_at_once_leave_nothing(fresh: Client) -> None:
    fresh.complete(WHOLE, cache_hit_threshold=0)

    def send(i: int) -> bool:
        ids, status = (WHOLE, 200) if i % 2 else (OTHER, 412)
        return fresh.raw({"prompt": ids, "max_tokens": 2, "stream": i % 4 < 2}).status_code == status

    with ThreadPoolExecutor(48) as pool:
        assert all(pool.map(send, range(200)))
    assert fresh.metric("vllm:undercroft_hook_errors_total") == 0
    fresh.reset()
    assert the_choice(fresh.complete(OTHER, cache_hit_threshold=0))["finish_reason"] == "length"
    assert "Traceback" not in fresh.server.log.read_text()
