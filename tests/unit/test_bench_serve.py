"""`undercroft bench serve` against a stand-in for a vLLM server: its requests, and its result from the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from measured_vllm import COLD_S, DEVICE_S, WARM_S, FakeVllm, listening
from undercroft.cli import main


@pytest.fixture
def server() -> Iterator[tuple[FakeVllm, str]]:
    fake = FakeVllm()
    with listening(fake) as url:
        yield fake, url


def bench(capsys: pytest.CaptureFixture[str], url: str, *argv: str) -> dict[str, Any]:
    size = ["--prompts", "4", "--prompt-tokens", "200"]
    assert main.main(["bench", "serve", "--url", url, *size, "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("has_reset", [True, False])
def test_cold_and_warm_are_told_apart(
    has_reset: bool, server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    fake.has_reset = has_reset
    found = bench(capsys, url)
    cases = {case["case"]: case for case in found["cases"]}
    times = [cases[name]["ttft_p50_ms"] for name in ("cold", "warm", "device")]
    assert times == pytest.approx([1e3 * COLD_S, 1e3 * WARM_S, 1e3 * DEVICE_S])
    assert found["speedup"] == pytest.approx(COLD_S / WARM_S)
    assert (cases["cold"]["cached_percent"], cases["device"]["cached_percent"]) == (0, 100)
    assert 99 < cases["warm"]["cached_percent"] < 100
    assert found["prompt_tokens"] == pytest.approx(200, abs=4)
    if has_reset:
        assert (found["device_cache"], found["fill_tokens"]) == ("emptied", None)
        assert len(fake.prompts) == 1 + 4 + 1 + 4
    else:
        assert found["device_cache"] == "displaced by other prompts"
        assert 1600 <= found["fill_tokens"] < 1900
    # No prompt is that of an earlier run.
    bench(capsys, url)
    assert len(set(fake.prompts)) >= 2 * 5


def test_what_is_not_said_is_asked_for_or_left_out(
    server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    fake.has_reset = fake.says_sizes = fake.says_cached = False
    arguments = ["bench", "serve", "--url", url, "--prompts", "4", "--prompt-tokens", "200"]
    assert main.main(arguments) == 1
    assert "give --fill-tokens" in capsys.readouterr().err
    found = bench(capsys, url, "--fill-tokens", "1600")
    assert {case["cached_percent"] for case in found["cases"]} == {None}


def test_text_has_a_bar_for_each_case(server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]) -> None:
    _, url = server
    assert main.main(["bench", "serve", "--url", url, "--prompts", "2", "--prompt-tokens", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["cold", "device", "warm"]
    bars = [line.count("#") for line in lines[:3]]
    assert bars[0] > bars[2] > bars[1] > 0


def test_a_server_that_refuses_or_is_not_there_is_one_line(
    server: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = server
    fake.key = "secret"
    assert main.main(["bench", "serve", "--url", url]) == 1
    assert "HTTP 401" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert main.main(["bench", "serve", "--url", f"{url}/v1/", "--prompts", "1", "--prompt-tokens", "50"]) == 0
    capsys.readouterr()
    assert main.main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "does not answer" in error
    assert error.count("\n") == 1
