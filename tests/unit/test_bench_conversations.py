"""`undercroft bench serve --turns` and `--trace` against a stand-in for vLLM that caches prefixes of token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from measured_vllm import COLD_S, WARM_S, FakeVllm, bench, server_of
from undercroft.cli import main

BLOCK = 16


class PrefixVllm(FakeVllm):
    """Caches whole blocks of prompts of token ids."""

    def complete(self, prompt: Any) -> tuple[float, int]:
        known = {tuple(old[:end]) for old in self.prompts for end in range(BLOCK, len(old) + 1, BLOCK)}
        ends = [end for end in range(BLOCK, len(prompt), BLOCK) if tuple(prompt[:end]) in known]
        self.prompts.append(prompt)
        return (WARM_S, max(ends)) if ends else (COLD_S, 0)


server = server_of(PrefixVllm)


def test_turns_of_a_conversation_return_with_the_prompt_before(
    server: tuple[PrefixVllm, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    found = bench(capsys, url, "--turns", "4", "--prompts", "3", "--prompt-tokens", "256")
    assert [len(prompt) for prompt in fake.prompts] == [64] * 3 + [128] * 3 + [192] * 3 + [256] * 3
    assert fake.prompts[3][:64] == fake.prompts[0] != fake.prompts[1]
    cases = {case["case"]: case for case in found["cases"]}
    times = [cases[name]["ttft_p50_ms"] for name in ("new", "returning")]
    assert times == pytest.approx([1e3 * COLD_S, 1e3 * WARM_S])
    assert (cases["new"]["cached_percent"], found["requests"]) == (0, 12)
    assert (cases["new"]["prompt_tokens"], cases["returning"]["prompt_tokens"]) == (64, 192)
    # 64 + 128 + 192 of each 640 tokens are those of the turn before.
    assert found["seen_percent"] == pytest.approx(60) == pytest.approx(found["cached_percent"])
    first = fake.prompts[0]
    bench(capsys, url, "--turns", "1", "--prompts", "1", "--prompt-tokens", "64")
    assert fake.prompts[-1] != first, "a second run must not find the first one's prompts"


def test_a_trace_is_asked_in_its_order_and_as_long_as_the_model_allows(
    server: tuple[PrefixVllm, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake, url = server
    fake.max_model_len = 1208
    lines = [
        {"timestamp": 0, "input_length": 1100, "hash_ids": [1, 2, 3]},
        {"timestamp": 9, "input_length": 1600, "hash_ids": [1, 2, 4, 5]},
        {"timestamp": 12, "input_length": 700, "hash_ids": [7, 8]},
        {"timestamp": 20, "input_length": 700, "hash_ids": [9, 8]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = bench(capsys, url, "--trace", str(file), "--prompts", "3")
    assert [len(prompt) for prompt in fake.prompts] == [1100, 1200, 700]
    assert fake.prompts[0][:1024] == fake.prompts[1][:1024]
    assert (found["requests"], found["shortened_requests"]) == (3, 1)
    assert found["seen_percent"] == pytest.approx(100 * 1024 / 3000)
    assert found["cached_percent"] == pytest.approx(found["seen_percent"], abs=1)


def test_arguments_without_an_effect_and_files_without_a_trace_are_refused(
    server: tuple[PrefixVllm, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, url = server
    assert main.main(["bench", "serve", "--url", url, "--turns", "2", "--fill-tokens", "100"]) == 2
    assert "--fill-tokens" in capsys.readouterr().err
    assert main.main(["bench", "serve", "--url", url, "--trace", str(tmp_path / "none")]) == 2
    assert "cannot be read as a trace" in capsys.readouterr().err
