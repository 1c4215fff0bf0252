"""The option `record`: the trace of a real engine, in which `undercroft estimate` finds the engine's hits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from connector_engine import settled
from real_engine import Engine, prompt
from undercroft.cli import main
from undercroft.estimate.trace import read

pytestmark = pytest.mark.vllm


def test_the_estimate_of_a_recorded_trace_matches_the_hits_of_the_engine(
    llama: Path, engine: Callable[..., Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    options = {"host_memory": "32MiB", "record": str(path), "min_load_tokens": 0}
    running = engine(llama, options, blocks=96)
    cached, tokens = 0, 0
    # 12 prompts of some blocks of 512 KiB, more than 32 MiB hold; some come again and go on.
    for turn in range(3):
        for seed in (1, 2, 3, 4, 5, 6, 1, 2):
            ids = prompt(700 + 256 * turn, seed)
            cached += running.generate(ids, 2).cached
            tokens += len(ids)
            settled(running)
    running.close()
    trace = read(path)
    assert trace.block_tokens == 128
    assert (len(trace.requests), trace.tokens) == (24, tokens)
    assert trace.cached_percent == pytest.approx(100 * cached / tokens)
    assert 5 < trace.cached_percent < 90
    arguments = ["--model", str(llama), "--block-size", "128", "--dtype", "float32", "--host-memory", "32MiB", "--json"]
    capsys.readouterr()  # vLLM's own lines
    assert main.main(["estimate", "--trace", str(path), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cases"][0]["hit_percent"] == pytest.approx(trace.cached_percent, abs=2)
    # No token, and no block hash of vLLM's, is in the file.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert set(lines[0]) == {"undercroft_trace", "block_tokens"}
    assert set(lines[1]) == {"timestamp", "input_length", "output_length", "cached", "hash_ids"}
    assert all(0 <= block < 1 << 48 for line in lines[1:] for block in line["hash_ids"])


def test_a_file_that_cannot_be_written_harms_nothing(
    llama: Path, engine: Callable[..., Engine], tmp_path: Path
) -> None:
    running = engine(llama, {"host_memory": "32MiB", "record": str(tmp_path / "no" / "directory")}, blocks=96)
    ids = prompt(300)
    first = running.generate(ids, 4)
    settled(running)
    again = running.generate(ids, 4)
    assert (again.tokens, again.cached) == (first.tokens, 256)
