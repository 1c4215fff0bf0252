"""`undercroft estimate`: a trace has about the same hits on the engine without payloads as on a real engine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from core_values import Group, granted
from undercroft import _core
from undercroft.cli import main
from undercroft.errors import ConfigError
from undercroft.estimate.replay import Outcome
from undercroft.estimate.savings import Machine, savings
from undercroft.estimate.trace import Trace, read
from undercroft.model.groups import KVGroup

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
    # The learned order of a small cache differs by chance.
    assert all(more > less - 0.3 for less, more in itertools.pairwise(curve))
    assert curve[-1] == pytest.approx(rates[1], abs=0.5), "all of it fits"
    assert found["unlimited"]["hit_percent"] == curve[-1]
    for case in found["cases"]:
        assert case["hit_percent"] == pytest.approx(case["host_hit_percent"] + case["disk_hit_percent"])
        assert case["prefill_seconds_avoided"] == case["hit_tokens"] / 1000
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
    assert "\n\nbreak-even: a hit is faster than computing where a tier is read at more than" in said


# Host memory for 16 blocks, of which writes that wait take 8, and a disk that writes half a block a second.
SMALL = ["--host-memory", "512KiB", "--disk", "64MiB"]
SLOW = ["--write-rate", "16KiB", "--read-rate", "256kB/s"]


@pytest.fixture
def again(tmp_path: Path) -> str:
    """A trace of prompts of 8 blocks: three, of which the second comes soon, then the first two again."""
    prompts = [(0, 0), (9, 100), (1000, 200), (2000, 0), (3000, 100)]
    blocks = [[*range(first, first + 8)] for _, first in prompts]
    lines = [
        line(timestamp=1000 * at, input_length=4096, hash_ids=of) for (at, _), of in zip(prompts, blocks, strict=True)
    ]
    (tmp_path / "trace").write_text("".join(lines))
    return str(tmp_path / "trace")


def test_a_write_that_the_disk_has_no_time_for_is_a_miss_later(
    again: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = ["--trace", again, *SMALL, "--prefill-rate", "1000", "--copy-rate", "1MB"]
    fast, slow = (estimate(capsys, tmp_path, *figures, *rates)["cases"][1] for rates in ([], SLOW))
    assert (fast["disk_hit_percent"], fast["hit_tokens"]) == (pytest.approx(40), 16 * 512)
    assert (fast["load_seconds"], fast["net_seconds_saved"], fast["disk_dropped_bytes"]) == (None, None, 0)
    # When the second prompt comes, 4 blocks of the first are written and 4 wait: there is room for 4 of its own.
    assert (slow["host_hit_percent"], slow["hit_tokens"]) == (0, 12 * 512)
    assert (slow["disk_write_bytes"], slow["disk_dropped_bytes"]) == (20 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    read, copied = 12 * BLOCK_BYTES / 256_000, 12 * BLOCK_BYTES / 1e6
    assert slow["prefill_seconds_avoided"] == 6.144
    assert slow["load_seconds"] == pytest.approx(read + copied)
    assert slow["net_seconds_saved"] == pytest.approx(6.144 - read - copied)
    assert slow["disk_busy_percent"] == pytest.approx(100 * (read + 40) / 3000)
    assert slow["disk_write_bytes_per_day"] == int(20 * BLOCK_BYTES / 3000 * 86400)
    assert slow["disk_writes_per_day"] == 0.28125
    assert slow["warnings"] == [
        "the disk has no time for 17 % of the writes, which are not made; --disk-admission second_touch writes less"
    ]


def test_the_output_of_bench_disk_has_the_rates(again: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rates = tmp_path / "disk.json"
    rates.write_text(json.dumps({"write_gbps": 16384e-9, "read_gbps": 256e-6, "depth": 32}))
    figures = ["--trace", again, *SMALL, "--prefill-rate", "1000"]
    measured = estimate(capsys, tmp_path, *figures, "--disk-rates", str(rates))
    assert measured == estimate(capsys, tmp_path, *figures, *SLOW)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--disk-writes-per-day", "0.28"], "0.281 times its size is written a day, and the disk is made for 0.28"),
        (["--disk-writes-per-day", "0.29"], None),
        # Reads take as long as computing, and the copy comes on top.
        (["--read-rate", "64kB"], "vLLM computes faster than the disk is loaded (62.5 KiB/s): it saves no time"),
        (["--read-rate", "130"], "reads and writes together need 102 % of the disk's time"),
    ],
)
def test_a_disk_that_is_not_made_for_it_is_warned_of(
    arguments: list[str], said: str | None, again: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = ["--trace", again, *SMALL, "--prefill-rate", "1000", *SLOW, *arguments]
    case = estimate(capsys, tmp_path, *figures)["cases"][1]
    assert [any(said in warning for warning in case["warnings"]) if said else len(case["warnings"]) == 1] == [True]
    if "--read-rate" in arguments:
        assert case["net_seconds_saved"] == 0
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert main.main(["estimate", "--model", str(tmp_path), "--block-size", "512", *figures]) == 0
    assert (f"warning: 512 KiB, 64 MiB: {said}" in capsys.readouterr().out) == bool(said)


def test_a_cache_without_limits_has_a_row(again: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = ["--trace", again, "--host-memory", "512KiB", "--prefill-rate", "1000", "--copy-rate", "1MB"]
    found = estimate(capsys, tmp_path, *figures)
    assert [case["hit_tokens"] for case in found["cases"]] == [0]
    unlimited = found["unlimited"]
    assert (unlimited["host_memory"], unlimited["hit_tokens"], unlimited["disk_hit_percent"]) == (None, 8192, 0)
    assert unlimited["net_seconds_saved"] == pytest.approx(8.192 - 8192 * 64 / 1e6)
    assert main.main(["estimate", "--model", str(tmp_path), "--block-size", "512", *figures]) == 0
    assert "unlimited  -     40.0   40.0     0.0      40.0  40.0     8 s              8 s" in capsys.readouterr().out


def test_lru_and_the_optimum_stand_beside_the_policy(
    again: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    case = estimate(capsys, tmp_path, "--trace", again, "--host-memory", "512KiB")["cases"][0]
    # 16 blocks hold the first two prompts, if the third is not stored.
    assert (case["lru_hit_percent"], case["optimum_hit_percent"]) == (0, pytest.approx(40))
    found = estimate(capsys, tmp_path, "--trace", str(SAMPLE), "--host-memory", "24MiB,96MiB")
    for case in found["cases"]:
        assert 1 < case["lru_hit_percent"] <= case["optimum_hit_percent"] <= found["unlimited"]["hit_percent"] + 0.1
        assert case["hit_percent"] <= case["optimum_hit_percent"] + 0.1


def test_no_disk_is_one_of_several_sizes(again: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = ["--trace", again, "--host-memory", "512KiB", "--disk"]
    several = estimate(capsys, tmp_path, *figures, "0,64MiB,32MiB,64MiB")
    assert [case["disk"] for case in several["cases"]] == [0, 64 << 20, 32 << 20]
    assert several["cases"][:2] == estimate(capsys, tmp_path, *figures, "64MiB")["cases"]
    assert several["cases"][:1] == estimate(capsys, tmp_path, *figures, "0")["cases"]


def test_a_load_has_the_windows_and_states_of_its_end() -> None:
    groups = [
        KVGroup(kind="full", layers=1, block_tokens=16, payload_bytes=160, window_tokens=0),
        KVGroup(kind="state", layers=1, block_tokens=16, payload_bytes=700, window_tokens=0),
    ]
    outcome = Outcome(1000, 100, 200, host_hits=2, disk_hits=3, disk_write_tokens=50, disk_dropped_tokens=10)
    found = savings(outcome, groups, 4000, 200, 100.0, Machine(10, 1000, 500, 250, 1.0))
    host, disk = 100 * 10 + 2 * 700, 200 * 10 + 3 * 700
    assert found.load_seconds == pytest.approx(host / 1000 + disk / 500 + disk / 1000)
    assert found.net_seconds_saved == pytest.approx(30 - host / 1000 - disk / 500 - disk / 1000)
    assert (found.disk_write_bytes, found.disk_dropped_bytes) == (50 * 20, 10 * 20)
    assert found.disk_busy_percent == pytest.approx(disk / 500 + 1000 / 250)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "output of undercroft bench disk --json"),
        ("[1]", "read_gbps is None"),
        ('{"read_gbps": 3}', "write_gbps is None, and must be a number above 0"),
        ('{"read_gbps": "3", "write_gbps": 1}', "read_gbps is '3'"),
        ('{"read_gbps": 3, "write_gbps": 0}', "write_gbps is 0,"),
        ('{"read_gbps": 3, "write_gbps": -1}', "write_gbps is -1"),
        ('{"read_gbps": true, "write_gbps": 1}', "read_gbps is True"),
        ('{"read_gbps": NaN, "write_gbps": 1}', "read_gbps is nan"),
        ('{"read_gbps": Infinity, "write_gbps": 1}', "read_gbps is inf"),
    ],
)
def test_a_file_without_measured_disk_rates_is_refused(
    text: str | None, said: str, again: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rates = tmp_path / "disk.json"
    if text is not None:
        rates.write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    figures = ["--model", str(tmp_path), "--trace", again, *SMALL, "--disk-rates", str(rates)]
    assert main.main(["estimate", *figures]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert f"--disk-rates {rates}" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--read-rate", "1GB", "--disk-rates", "f"], "--disk-rates and --read-rate name the same rate"),
        (["--write-rate", "1GB", "--disk", "0"], "--write-rate is the rate of a disk, and --disk names none"),
        (["--host-memory", "64KiB"], "64 KiB for the host tier holds 0 tokens"),
        (["--trace-block", "4096"], "holds 8,192 tokens of this model, and the replay needs 4 blocks of 4096 tokens"),
    ],
)
def test_sizes_and_rates_that_do_not_fit_together_are_refused(
    arguments: list[str], said: str, again: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    figures = ["--model", str(tmp_path), "--block-size", "512", "--trace", again, *SMALL, *arguments]
    assert main.main(["estimate", *figures]) == 2
    assert said in capsys.readouterr().err


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
    path.write_text(line(session_id="a", user="b") + line(user="a") + line(user_id=7) + line())
    sessions = [request.session for request in read(path, 16).requests]
    assert sessions[0] == sessions[1] != sessions[2]
    assert (sessions[2] is None, sessions[3]) == (False, None)
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
def test_a_file_that_is_no_trace_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none")
