"""The hit threshold over HTTP on a server with too little device memory: requests are preempted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from threshold_http import REASON, Client, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [[5 + (17 * i + 7 * j) % 990 for i in range(500)] for j in range(4)]
SIZES = ["--num-gpu-blocks-override", "18", "--no-enable-prefix-caching"]


@pytest.fixture(scope="module")
def client(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with start_server(llama_with_tokenizer, log, {}, *SIZES, connector=("StandIn", "threshold_standin")) as client:
        yield client


@pytest.mark.parametrize("answer", ["finish_reason", "error"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_a_preempted_request_has_generated_are_kept(client: Client, stream: bool, answer: str) -> None:
    """With threshold 0.001: served at arrival, when its prompt is said to be cached, and rejected when it is not."""
    expected = [tokens for tokens, _ in send(client, stream, cache_hit_threshold=0)]
    params = {"cache_hit_threshold": 0.001, "cache_hit_threshold_answer": answer, "pretend_at_arrival": 500}
    results = send(client, stream, kv_transfer_params=params)
    assert {reason for _, reason in results} == {REASON, "length"}
    for (tokens, reason), reference in zip(results, expected, strict=True):
        assert 0 < len(tokens) < 100 if reason == REASON else len(tokens) == 100
        assert tokens == reference[: len(tokens)]
    assert client.metric("vllm:num_preemptions_total") > 0
    client.wait_until_idle()


def send(client: Client, stream: bool, **fields: Any) -> list[tuple[list[int], str]]:
    """Tokens and finish reason of each prompt; all are sent in one request, so that they run together."""
    body = {"prompt": PROMPTS, "max_tokens": 100, "return_token_ids": True} | fields
    if stream:
        *events, last = client.events("/v1/completions", body)
        usage, choices = last["usage"], [choice for event in events for choice in event["choices"]]
    else:
        answer = client.raw(body).json()
        usage, choices = answer["usage"], answer["choices"]
    results: list[tuple[list[int], str]] = [([], "")] * len(PROMPTS)
    for choice in choices:
        tokens, reason = results[choice["index"]]
        results[choice["index"]] = (tokens + choice["token_ids"], choice["finish_reason"] or reason)
    assert usage["completion_tokens"] == sum(len(tokens) for tokens, _ in results)
    return results
