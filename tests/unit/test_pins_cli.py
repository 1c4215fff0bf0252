"""`undercroft pin` and `undercroft unpin`, against a server that answers as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from undercroft.cli.main import main

ACCEPTED = {"answer": "accepted", "tokens": 128}


class Vllm:
    """The requests that a server got, and its answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answer: dict[str, Any] | None = ACCEPTED
        self.status = 200


@pytest.fixture
def vllm() -> Iterator[tuple[Vllm, str]]:
    known = Vllm()

    class Handler(BaseHTTPRequestHandler):
        def _send(self, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(known.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self._send({"data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known.asked.append((self.path, body))
            [verb, _] = body["kv_transfer_params"]["kv_hints"]
            answers = None if known.answer is None else {"kv_hints": {verb: known.answer}}
            self._send({"kv_transfer_params": answers})

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield known, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def lines(tmp_path: Path, *values: Any) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(value) for value in values) + "\n\n", encoding="utf-8")
    return str(file)


def test_each_prompt_is_pinned_and_nothing_is_computed(
    vllm: tuple[Vllm, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, url = vllm
    chat = {"messages": [{"role": "user", "content": "hello"}], "model": "other"}
    assert main(["pin", "--url", url, "--ttl", "60", lines(tmp_path, "text", [1, 2, 3], chat)]) == 0
    assert [path for path, _ in known.asked] == ["/v1/completions"] * 2 + ["/v1/chat/completions"]
    assert [body.get("prompt") for _, body in known.asked] == ["text", [1, 2, 3], None]
    assert [body["model"] for _, body in known.asked] == ["first", "first", "other"]
    params = {"kv_hints": {"pin": {"ttl_s": 60.0}, "compute": False}}
    assert all(body["kv_transfer_params"] == params for _, body in known.asked)
    assert capsys.readouterr().out.splitlines() == [f"line {at}: accepted, 128 tokens" for at in (1, 2, 3)]


def test_hashes_are_handed_on(vllm: tuple[Vllm, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, url = vllm
    known.answer = {"answer": "rejected", "tokens": 0, "reason": "not_pinned"}
    file = lines(tmp_path, ["ab" * 32, "cd" * 32])
    assert main(["unpin", "--url", url, "--hashes", "--id", "chat", "--json", file]) == 1
    [(_, body)] = known.asked
    expected = {"release": {"id": "chat", "hashes": ["ab" * 32, "cd" * 32]}, "compute": False}
    assert body["kv_transfer_params"]["kv_hints"] == expected
    assert json.loads(capsys.readouterr().out) == {"answers": [known.answer]}


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ('"a"\n{"x": 1}', [], 'line 2: allowed: text in quotes, a list of token ids, or an object with "prompt"'),
        ("not json", [], "line 1: it is not JSON"),
        ('["ab", "abcd"]', ["--hashes"], "block hashes"),
        ("", [], "it has no line"),
        ('"a"\n"b"', ["--id", "x"], "--id x: the name is one pin's, and the file has 2 lines"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, arguments: list[str], said: str
) -> None:
    file = tmp_path / "prompts"
    file.write_text(content, encoding="utf-8")
    assert main(["pin", *arguments, str(file)]) != 0
    assert said in capsys.readouterr().err


def test_a_server_that_knows_no_hints_or_is_away_is_named(
    vllm: tuple[Vllm, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, url = vllm
    known.answer = None
    file = lines(tmp_path, "text")
    assert main(["pin", "--url", url, file]) == 1
    assert "does not answer hints" in capsys.readouterr().err
    known.status = 400
    assert main(["pin", "--model", "m", "--url", url, file]) == 1
    assert "HTTP 400" in capsys.readouterr().err
    assert main(["pin", "--url", "http://127.0.0.1:1", file]) == 1
    assert "no vLLM answers there" in capsys.readouterr().err
