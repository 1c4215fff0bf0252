"""`undercroft estimate`: a trace has about the same hits on the engine without payloads as on a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core_values import Group, granted
from undercroft import _core
from undercroft.cli import main
from undercroft.errors import ConfigError
from undercroft.estimate.trace import Trace, read

SAMPLE = Path(__file__).parents[2] / "rust/bench/tests/data/conversation_1000.jsonl"
# 64 bytes for each token.
MODEL = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "head_dim": 16}
BLOCK_BYTES = 512 * 64


def estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: str, code: int = 0) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert main.main(["estimate", "--model", str(tmp_path), "--block-size", "512", "--json", *argv]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def served(trace: Trace, tmp_path: Path, host: int, disk: int) -> float:
    """The percentage of tokens that a real engine with payloads finds, with a disk if it has one."""
    disks = [{"path": str(tmp_path / "store"), "capacity": disk}] if disk else []
    engine = _core.Engine({"host_memory": host, "disks": disks, "socket_dir": str(tmp_path / "run")})
    session = engine.register("{}", [Group("full", 512, BLOCK_BYTES)], 512)
    hits = 0
    for number, request in enumerate(trace.requests):
        name, hashes = str(number), [block.to_bytes(8, "little") * 4 for block in request.blocks]
        limit = request.prompt_blocks * 512
        found = session.lookup(name, hashes, 0, limit)
        if found.pending:
            assert session.wait(name, 30.0)
            found = session.lookup(name, hashes, 0, limit)
        hits += found.tokens
        if found.tokens:
            load = session.begin_load(name, 0, found.tokens)
            assert load is not None
            session.end_transfer(load.transfer_id, True)
        save = session.begin_save(name, hashes, len(hashes) * 512)
        if save is not None and (save := granted(session, save)).extents:
            session.end_transfer(save.transfer_id, True)
        session.finish_request(name)
        # As with a real engine, saved blocks reach the disk between two requests.
        if disk and number % 8 == 0:
            assert engine.flush()
    engine.close()
    return 100 * hits / trace.tokens


@pytest.mark.parametrize(("host", "disk"), [(24, 0), (96, 0), (24, 128), (48, 1024)])
def test_the_estimate_is_within_two_points_of_the_real_engine(
    host: int, disk: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = ["--host-memory", f"{host}MiB"] + (["--disk", f"{disk}MiB"] if disk else [])
    found = estimate(capsys, tmp_path, "--trace", str(SAMPLE), *sizes)["cases"][-1]
    real = served(read(SAMPLE), tmp_path, host << 20, disk << 20)
    assert real > 1
    assert found["hit_percent"] == pytest.approx(real, abs=2)


def test_more_memory_and_a_disk_find_more(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--host-memory", "24MiB,96MiB", "--disk", "2GiB", "--prefill-rate", "1000"]
    found = estimate(capsys, tmp_path, "--trace", str(SAMPLE), *sizes)
    rates = [case["hit_percent"] for case in found["cases"]]
    # 24 MiB without and with the disk, then 96 MiB.
    assert rates[0] < rates[2] < rates[1] == pytest.approx(rates[3], abs=0.5)
    curve = [point["hit_percent"] for point in found["host_only"]]
    assert curve == sorted(curve)
    assert curve[-1] == pytest.approx(rates[1], abs=0.5), "all of it fits"
    for case in found["cases"]:
        assert case["hit_percent"] == pytest.approx(case["host_hit_percent"] + case["disk_hit_percent"])
        assert case["prefill_seconds_saved"] == case["hit_tokens"] / 1000
        assert (case["disk_write_bytes"] > 0) == (case["disk"] > 0)
    with_disk = found["cases"][1]
    per_day = with_disk["disk_write_bytes"] * 86400 / found["seconds"]
    assert with_disk["disk_write_bytes_per_day"] == pytest.approx(per_day, rel=1e-6)
    assert found["break_even_bytes_per_second"] == 64_000


def test_text_has_a_table_and_a_chart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    arguments = ["estimate", "--model", str(tmp_path), "--trace", str(SAMPLE), "--host-memory", "64MiB"]
    assert main.main([*arguments, "--disk", "1GiB", "--prefill-rate", "5000"]) == 0
    said = capsys.readouterr().out
    assert "1,000 requests, " in said
    assert [line.split()[0] for line in said.splitlines() if "MiB" in line][:2] == ["64", "64"]
    assert "#########" in said
    assert "break-even: a hit is faster than computing where a tier is read at more than" in said


def line(**values: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 32, "hash_ids": [1, 2]} | values) + "\n"


def test_a_trace_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    header = json.dumps({"undercroft_trace": 1, "block_tokens": 16}) + "\n"
    generated = line(timestamp=2000, hash_ids=[1, 2, 3], cached=16)
    path.write_text(header + generated + header + line(timestamp=1000, input_length=33, cached=0) + '{"timest')
    trace = read(path)
    assert (trace.block_tokens, trace.tokens, trace.seconds, trace.unique_blocks) == (16, 65, 1.0, 3)
    first, second = trace.requests
    assert (first.prompt_blocks, first.blocks) == (2, [1, 2])
    assert (second.prompt_blocks, second.blocks) == (2, [1, 2, 3]), "generated tokens are no part of the prompt"
    assert trace.cached_percent == pytest.approx(100 * 16 / 65)
    # Without a header blocks have 512 tokens, and the last is not full.
    path.write_text(line(input_length=1000))
    assert read(path).requests[0].blocks == [1]
    path.write_text(line(input_length=64, hash_ids=[1, 2, 3]))
    assert (read(path, 32).requests[0].blocks, read(path, 32).cached_percent) == ([1, 2], None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing to replay"),
        (line(input_length=5), "nothing to replay"),
        ("{}\n", "line 1: 'input_length' is missing"),
        ("what\n" + line(), "line 1"),
        (line(input_length=900) + "[]\n" + line(), "line 2"),
        (line(hash_ids=[-1]), "no number"),
        ('{"undercroft_trace": 9}\n', "version 9"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none")
