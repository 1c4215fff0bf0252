"""Decode-first routing as the sidecar of llm-d's router 0.10.0 does it, told again over a real server's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from threshold_http import REASON, Client, output, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

THRESHOLD = "cache_hit_threshold"
CONFIGURED = 0.8
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
TEXT = "which of these two instances has seen me before " * 10
EVENT_END = b"\n\n"

Answer = tuple[int, bytes]


class Sidecar:
    """The sidecar's protocol for caches that both instances share (``--kv-connector=shared-storage``).

    One server is decode and prefill instance. ``asked`` has instance, threshold and token limit of each request.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.asked: list[tuple[str, float | None, int]] = []

    def post(self, path: str, body: dict[str, Any], *, prefill_instance: bool = True) -> Answer:
        """Status and body that the client gets. The router names the prefill instance in a header, or none."""
        if not prefill_instance:
            return self._whole("decode", path, body)
        if THRESHOLD in body:
            attempt = self._try_streamed if body.get("stream") is True else self._try_whole
            if (answer := attempt(path, body)) is not None:
                return answer
        one_token = {"max_tokens": 1, "max_completion_tokens": 1, THRESHOLD: 0}
        status, content = self._whole("prefill", path, body | one_token)
        if is_error(status):
            return status, content
        return self._whole("decode", path, body | {THRESHOLD: 0})

    def _try_whole(self, path: str, body: dict[str, Any]) -> Answer | None:
        """The decode instance's answer, None if it rejects the request."""
        status, content = self._whole("decode", path, body)
        return None if not is_error(status) and is_rejected(content) else (status, content)

    def _try_streamed(self, path: str, body: dict[str, Any]) -> Answer | None:
        """The same of a stream: its first two events decide, and the rest goes to the client as it comes."""
        self._count("decode", body)
        with self.client.http.stream("POST", path, json=body) as answer:
            pieces, head = answer.iter_raw(), b""
            while head.count(EVENT_END) < 2 and (piece := next(pieces, b"")):
                head += piece
            if not is_error(answer.status_code) and is_rejected(two_events(head)):
                return None
            return answer.status_code, head + b"".join(pieces)

    def _whole(self, instance: str, path: str, body: dict[str, Any]) -> Answer:
        self._count(instance, body)
        answer = self.client.http.post(path, json=body)
        return answer.status_code, answer.content

    def _count(self, instance: str, body: dict[str, Any]) -> None:
        self.asked.append((instance, body.get(THRESHOLD), body["max_tokens"]))


def is_error(status: int) -> bool:
    return not 200 <= status < 300


def two_events(stream: bytes) -> bytes:
    return EVENT_END.join(stream.split(EVENT_END)[:2]) + EVENT_END


def is_rejected(content: bytes) -> bool:
    """Whether the first choice of an answer, or of an event of a stream, has the reason."""
    lines = content.decode().split("\n") if content.startswith(b"data: ") else ["data: " + content.decode()]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    choices = [json.loads(one).get("choices") for one in data]
    return any(found[0].get("finish_reason") == REASON for found in choices if found)


def reasons(content: bytes) -> list[str]:
    """The finish reasons of a streamed or whole answer, by the choice's index."""
    events = [line.removeprefix("data: ") for line in content.decode().split("\n") if line and "[DONE]" not in line]
    found = {one["index"]: one["finish_reason"] for event in events for one in json.loads(event)["choices"]}
    return [found[index] for index in sorted(found)]


@pytest.fixture(scope="module")
def client(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    # A configured threshold shows that the sidecar's 0 counts, and not the absence of any.
    options = {"host_memory": "256MiB", "client_fields": ["threshold"], THRESHOLD: CONFIGURED}
    with start_server(llama_with_tokenizer, log, options, "--num-gpu-blocks-override", "512") as client:
        yield client


@pytest.fixture
def fresh(client: Client) -> Client:
    client.reset()
    return client


@pytest.fixture
def sidecar(fresh: Client) -> Sidecar:
    return Sidecar(fresh)


def request(path: str, stream: bool, **fields: Any) -> dict[str, Any]:
    said = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXT}]}
    return {"model": "m", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": stream} | said | fields


@PATHS
@STREAM
def test_decode_alone_answers_if_enough_is_cached(sidecar: Sidecar, fresh: Client, path: str, stream: bool) -> None:
    body = request(path, stream, **{THRESHOLD: 0.5})
    direct = fresh.http.post(path, json=body | {THRESHOLD: 0})
    fresh.reset()
    status, cold = sidecar.post(path, body)
    assert status == 200 and output(cold.decode(), stream) == output(direct.text, stream)
    assert sidecar.asked == [("decode", 0.5, 6), ("prefill", 0, 1), ("decode", 0, 6)]
    # On the device nothing is left: undercroft's blocks alone make the share.
    fresh.reset_device()
    sidecar.asked.clear()
    status, warm = sidecar.post(path, body)
    assert status == 200 and output(warm.decode(), stream) == output(direct.text, stream)
    assert sidecar.asked == [("decode", 0.5, 6)]


@PATHS
@pytest.mark.parametrize(
    "usage", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_two_events_of_a_stream_have_the_rejection(fresh: Client, path: str, usage: dict[str, bool]) -> None:
    options = {"stream_options": usage} if usage else {}
    answer = fresh.http.post(path, json=request(path, True, **{THRESHOLD: 0.5}, **options))
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert answer.content.count(EVENT_END) >= 2 and is_rejected(two_events(answer.content))


@PATHS
@STREAM
def test_the_prefill_answers_one_token_despite_the_configured_threshold(
    sidecar: Sidecar, fresh: Client, path: str, stream: bool
) -> None:
    """A request without a threshold goes to the prefill instance first, and the sidecar's 0 keeps it from rejection."""
    status, content = sidecar.post(path, request(path, stream))
    assert (status, reasons(content)) == (200, ["length"])
    assert sidecar.asked == [("prefill", 0, 1), ("decode", 0, 6)]
    body = request(path, stream, max_tokens=1, max_completion_tokens=1, **{THRESHOLD: 0})
    assert reasons(fresh.http.post(path, json=body).content) == ["length"]


@STREAM
def test_an_error_of_the_decode_instance_reaches_the_client(sidecar: Sidecar, stream: bool) -> None:
    status, content = sidecar.post(CHATS, request(CHATS, stream, **{THRESHOLD: 7}))
    assert status == 400 and THRESHOLD in json.loads(content)["error"]["message"]
    assert sidecar.asked == [("decode", 7, 6)]


@PATHS
@STREAM
def test_without_a_prefill_instance_the_client_gets_the_rejection(sidecar: Sidecar, path: str, stream: bool) -> None:
    status, content = sidecar.post(path, request(path, stream, **{THRESHOLD: 0.5}), prefill_instance=False)
    assert (status, reasons(content)) == (200, [REASON])


def test_a_streamed_chat_of_two_samples_hides_the_rejection(sidecar: Sidecar) -> None:
    """Its first two events name the role of each sample (docs/llm-d.md)."""
    status, content = sidecar.post(CHATS, request(CHATS, True, n=2, temperature=1, **{THRESHOLD: 0.5}))
    assert (status, reasons(content)) == (200, [REASON, REASON])
    assert sidecar.asked == [("decode", 0.5, 6)]


def test_the_first_prompt_of_a_batch_decides_for_all(sidecar: Sidecar, fresh: Client) -> None:
    fresh.http.post(COMPLETIONS, json=request(COMPLETIONS, False, **{THRESHOLD: 0}))
    batch = request(COMPLETIONS, False, prompt=[TEXT, "no instance knows these words " * 10], **{THRESHOLD: 0.5})
    status, content = sidecar.post(COMPLETIONS, batch)
    assert (status, reasons(content)) == (200, ["length", REASON])


def test_a_least_number_of_tokens_fails_at_the_prefill(sidecar: Sidecar) -> None:
    status, content = sidecar.post(COMPLETIONS, request(COMPLETIONS, False, min_tokens=4, **{THRESHOLD: 0.5}))
    assert status == 400 and "min_tokens" in json.loads(content)["error"]["message"]
    assert sidecar.asked == [("decode", 0.5, 6), ("prefill", 0, 1)]
