"""``undercroft bench replay``: a trace on the engine's own index and policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from undercroft.cli import main

SAMPLE = Path(__file__).parents[2] / "rust/bench/tests/data/conversation_1000.jsonl"


def replay(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main.main(["bench", "replay", "--trace", str(SAMPLE), "--json", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_tier_that_holds_everything_stores_each_block_once(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    full = [block for line in blocks for block in line["hash_ids"][: line["input_length"] // 512]]
    report = replay(capsys, "--host-blocks", "100000")
    assert (report["requests"], report["blocks"]) == (1000, len(full))
    assert report["host_inserted"] == len(set(full))
    assert report["hit_percent"] == pytest.approx(100 * (1 - len(set(full)) / len(full)))
    assert report["accesses_per_s"] > 0
    assert "disk_inserted" not in report


@pytest.mark.parametrize("policy", ["lru", "leafhd"])
def test_a_disk_more_than_doubles_the_hits_of_memory(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone = replay(capsys, "--host-blocks", "512", "--policy", policy)
    both = replay(capsys, "--host-blocks", "512", "--disk-blocks", "100000", "--policy", policy)
    assert both["hit_percent"] > 2 * alone["hit_percent"]
    assert both["disk_evicted"] == 0


def test_second_touch_writes_less(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ["--host-blocks", "512", "--disk-blocks", "100000"]
    writes = replay(capsys, *tiers)["disk_inserted"]
    assert replay(capsys, *tiers, "--second-touch")["disk_inserted"] < writes / 2


def test_errors_name_the_file_and_the_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    assert main.main(["bench", "replay", "--trace", str(missing), "--host-blocks", "512"]) == 1
    assert str(missing) in capsys.readouterr().err
    assert main.main(["bench", "replay", "--trace", str(SAMPLE), "--host-blocks", "1"]) == 1
    assert "arena" in capsys.readouterr().err
