"""Sleep over HTTP: the engine is in a process of its own, as in production."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from real_engine import prompt
from threshold_http import Client, start_server, the_choice

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

WHOLE = prompt(897)


@pytest.fixture(scope="module")
def client(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with start_server(llama_with_tokenizer, log, {"host_memory": "64MiB"}, "--num-gpu-blocks-override", "64") as client:
        yield client


def ask(client: Client) -> tuple[list[int], int]:
    """The tokens of the answer, and how many of the prompt were cached."""
    answer = client.complete(WHOLE)
    client.wait_until_idle()
    return the_choice(answer)["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def sleep_and_wake(client: Client, level: int) -> None:
    assert client.http.post("/sleep", params={"level": level}).status_code == 200
    assert client.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.http.post("/wake_up").json()["status"] == "awake"
    assert client.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.http.get("/is_paused").json() == {"is_paused": False}


def test_a_light_sleep_keeps_the_cache_and_a_deep_one_does_not(client: Client) -> None:
    tokens, cached = ask(client)
    assert cached == 0
    for level, kept in ((1, 896), (1, 896), (2, 0), (1, 896)):
        sleep_and_wake(client, level)
        assert ask(client) == (tokens, kept), f"after level {level}"
    assert client.metric("vllm:undercroft_hook_errors_total") == 0
