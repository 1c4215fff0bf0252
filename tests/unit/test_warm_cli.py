"""`undercroft warm`, against a server that answers as vLLM does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from http_vllm import HttpVllm, serving
from undercroft.cli.main import main


def computed(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """An answer as vLLM's; prompts that begin with "no" are refused."""
    prompt = body.get("prompt") or "chat"
    if str(prompt).startswith("no"):
        return 400, {"error": "the prompt is too long"}
    return 200, {"usage": {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 2}}}


def write(tmp_path: Path, *values: Any) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(value) for value in values), encoding="utf-8")
    return str(file)


def test_each_prompt_is_computed_to_one_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 500, "max_completion_tokens": 9, "n": 3}
    with serving(vllm := HttpVllm(computed)) as url:
        assert main(["warm", "--url", url + "/", "--parallel", "1", write(tmp_path, "text", [1, 2, 3], chat)]) == 0
    assert [path for path, _ in vllm.asked] == ["/v1/completions"] * 2 + ["/v1/chat/completions"]
    assert [body.get("prompt") for _, body in vllm.asked] == ["text", [1, 2, 3], None]
    assert [body["kv_transfer_params"] for _, body in vllm.asked] == [{"kv_hints": {"prefetch": True}}] * 3
    assert [(body["model"], body["max_tokens"], body["stream"]) for _, body in vllm.asked] == [("first", 1, False)] * 3
    assert not {"max_completion_tokens", "n"} & set(vllm.asked[2][1])
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == "1 of 3: line 1, 4 tokens, 2 of them cached"
    assert len(said.err.splitlines()) == 3
    assert said.out.startswith("3 prompts (0 refused), 11 tokens (6 of them were cached) in ")


def test_a_refused_prompt_does_not_end_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(vllm := HttpVllm(computed)) as url:
        assert main(["warm", "--url", url, "--model", "m", "--json", write(tmp_path, "no", "one", "two")]) == 1
    assert sorted(body["prompt"] for _, body in vllm.asked) == ["no", "one", "two"]
    found = json.loads(capsys.readouterr().out)
    assert (found["prompts"], found["refused"], found["tokens"], found["cached"]) == (3, 1, 6, 4)
    first, second, _ = found["lines"]
    assert "HTTP 400" in first["error"]
    assert second == {"line": 2, "tokens": 3, "cached": 2}


def test_prompts_are_computed_beside_each_other_and_no_more_than_asked_for(tmp_path: Path) -> None:
    together = threading.Barrier(3, timeout=30)
    now, most, lock = 0, 0, threading.Lock()

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait()
        with lock:
            now -= 1
        return computed(body)

    with serving(HttpVllm(answer)) as url:
        assert main(["warm", "--url", url, "--parallel", "3", write(tmp_path, *(f"p{at}" for at in range(9)))]) == 0
    assert most == 3


def test_without_a_vllm_the_command_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--url", "http://127.0.0.1:1", "--model", "m", write(tmp_path, "a", "b", "c")]) == 1
    assert "no vLLM answers there" in capsys.readouterr().err
    file = tmp_path / "prompts.jsonl"
    file.write_text("5", encoding="utf-8")
    assert main(["warm", str(file)]) == 2
    assert "line 1: allowed: text in quotes" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["argument", "environment"])
def test_the_key_of_a_vllm_is_sent(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(vllm := HttpVllm(computed, api_key="secret")) as url:
        arguments = ["warm", "--url", f"{url}/v1", "--model", "m", write(tmp_path, "a")]
        assert main(arguments) == 1
        assert "--api-key" in capsys.readouterr().err
        if place == "environment":
            monkeypatch.setenv("OPENAI_API_KEY", "secret")
        else:
            arguments += ["--api-key", "secret"]
        assert main(arguments) == 0
    assert [path for path, _ in vllm.asked] == ["/v1/completions"]
    assert capsys.readouterr().out.startswith("1 prompt (0 refused)")


@pytest.mark.parametrize("key", ["sk-hidden\n", "sk-hidden\r\nHost: other", "sk-hidden\u2026"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with serving(vllm := HttpVllm(computed, api_key="sk-hidden")) as url:
        assert main(["warm", "--url", url, "--model", "m", write(tmp_path, "a", "b")]) == 2
    said = capsys.readouterr()
    assert "OPENAI_API_KEY" in said.err
    assert "sk-hidden" not in said.err + said.out
    assert vllm.asked == []


def test_lines_end_only_with_line_breaks_and_empty_lines_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON text may hold the other separators of lines that Unicode has."""
    prompts = ["a\u2028b", "a\u2029b", "no\x85b"]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    file.write_text("\n" + "\r\n \n".join(lines), encoding="utf-8")
    with serving(vllm := HttpVllm(computed)) as url:
        assert main(["warm", "--url", url, "--model", "m", "--parallel", "1", "--json", str(file)]) == 1
    assert [body["prompt"] for _, body in vllm.asked] == prompts
    said = capsys.readouterr()
    assert [line["line"] for line in json.loads(said.out)["lines"]] == [2, 4, 6]
    assert said.err.splitlines()[1].startswith("2 of 3: line 4, ")


def test_an_interrupt_ends_the_command_at_once(tmp_path: Path) -> None:
    asked, end = threading.Event(), threading.Event()

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.set()
        end.wait(60)
        return computed(body)

    with serving(vllm := HttpVllm(answer)) as url:
        command = [sys.executable, "-m", "undercroft.cli.main", "warm", "--url", url, write(tmp_path, *"abcdefghi")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (130, "")
        assert not end.is_set() and len(vllm.asked) <= 4
        end.set()
