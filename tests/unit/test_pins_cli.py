"""`undercroft pin` and `undercroft unpin`, against a server that answers as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from http_vllm import HttpVllm, serving
from served_client import Peer, prompt
from undercroft import _core
from undercroft.cli.main import main

ACCEPTED = {"answer": "accepted", "tokens": 128}


class Vllm(HttpVllm):
    """A vLLM that gives each hint the same answer."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.hint: dict[str, Any] | None = ACCEPTED
        self.status = 200

    def _answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        [verb, _] = body["kv_transfer_params"]["kv_hints"]
        answers = None if self.hint is None else {"kv_hints": {verb: self.hint}}
        return self.status, {"kv_transfer_params": answers}


@pytest.fixture
def vllm() -> Iterator[tuple[Vllm, str]]:
    with serving(known := Vllm()) as url:
        yield known, url


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


def test_empty_lines_count_in_the_numbers_of_lines(
    vllm: tuple[Vllm, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, url = vllm
    file = tmp_path / "prompts.jsonl"
    file.write_text('\n"a"\n\n"b"\n', encoding="utf-8")
    assert main(["pin", "--url", url, "--ttl", "60", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"line {at}: accepted, 128 tokens" for at in (2, 4)]


def test_hashes_are_handed_on(vllm: tuple[Vllm, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, url = vllm
    known.hint = {"answer": "rejected", "tokens": 0, "reason": "not_pinned"}
    file = lines(tmp_path, ["ab" * 32, "cd" * 32])
    assert main(["unpin", "--url", url, "--hashes", "--id", "chat", "--json", file]) == 1
    [(_, body)] = known.asked
    expected = {"release": {"id": "chat", "hashes": ["ab" * 32, "cd" * 32]}, "compute": False}
    assert body["kv_transfer_params"]["kv_hints"] == expected
    assert json.loads(capsys.readouterr().out) == {"answers": [known.hint]}


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ('"a"\n{"x": 1}', [], 'line 2: allowed: text in quotes, a list of token ids, or an object with "prompt"'),
        ("not json", [], "line 1: it is not JSON"),
        ('["ab", "abcd"]', ["--hashes"], "block hashes"),
        ("", [], "the file has no line"),
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
    known.hint = None
    file = lines(tmp_path, "text")
    assert main(["pin", "--url", url, file]) == 1
    assert "does not answer hints" in capsys.readouterr().err
    known.status = 400
    assert main(["pin", "--model", "m", "--url", url, file]) == 1
    assert "HTTP 400" in capsys.readouterr().err
    assert main(["pin", "--url", "http://127.0.0.1:1", file]) == 1
    assert "no vLLM answers there" in capsys.readouterr().err


def test_the_pin_of_a_name_is_ended_without_a_file(vllm: tuple[Vllm, str], capsys: pytest.CaptureFixture[str]) -> None:
    known, url = vllm
    assert main(["unpin", "--url", url, "--id", "chat"]) == 0
    [(_, body)] = known.asked
    assert body["kv_transfer_params"]["kv_hints"] == {"release": {"id": "chat"}, "compute": False}
    assert main(["unpin", "--url", url]) == 2
    assert "--id" in capsys.readouterr().err


def test_blocks_are_pinned_at_the_socket_of_an_engine_inside_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disks = [{"path": str(tmp_path / "cache"), "capacity": 64 << 20}]
    options = {"host_memory": 16 << 20, "disks": disks, "share": True, "socket_dir": str(tmp_path / "run")}
    peer = Peer(_core.Engine(options))
    try:
        peer.save(prompt("a"))
        file = lines(tmp_path, [block.hex() for block in prompt("a")], [block.hex() for block in prompt("b")])
        where = ["--disk-path", str(tmp_path / "cache")]
        assert main(["pin", *where, "--hashes", "--json", file]) == 1
        unknown = {"answer": "rejected", "tokens": 0, "reason": "not_cached"}
        assert json.loads(capsys.readouterr().out) == {"answers": [ACCEPTED, unknown]}
        assert peer.engine.stats()["pins"] == 1
        one = lines(tmp_path, [block.hex() for block in prompt("a")])
        assert main(["unpin", *where, "--hashes", one]) == 0
        assert main(["pin", *where, "--hashes", "--id", "system", one]) == 0
        assert main(["unpin", *where, "--id", "system"]) == 0
        assert peer.engine.stats()["pins"] == 0
        capsys.readouterr()
        assert main(["unpin", *where, "--id", "system"]) == 1
        assert "not_pinned" in capsys.readouterr().out
        assert main(["pin", *where, "--namespace", "zz", "--hashes", one]) == 1
        assert "allowed is the beginning of one digest of those in use" in capsys.readouterr().err
        assert main(["pin", *where, one]) == 2
        assert "give --hashes and block hashes, or --url" in capsys.readouterr().err
    finally:
        peer.close()
