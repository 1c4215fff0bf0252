"""Hourly sums of an engine's counters: in the file, and in `undercroft explain --summary`."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from serve_process import ServeProcess
from served_client import Peer, prompt, until
from undercroft import _core
from undercroft.cli import main
from undercroft.connector.observe.stats import COUNTERS
from undercroft.hours import EVENTS, FILE, HOUR_S, KEPT, LOOKUPS, MISSED, HourlySums, Hours

NOW = int(time.time() // HOUR_S)


def test_the_sums_are_of_counters_that_an_engine_has() -> None:
    assert {*LOOKUPS, *MISSED, *EVENTS} <= COUNTERS


def test_hours_add_up_and_those_before_the_last_week_are_forgotten(tmp_path: Path) -> None:
    hours = Hours.read(tmp_path)
    for hour in range(KEPT + 5):
        hours.add(hour, {"a": 1})
        hours.add(hour, {"a": 2, "b": hour})
    hours.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    again = Hours.read(tmp_path)
    assert sorted(again.sums) == list(range(5, KEPT + 5))
    assert again.between(KEPT + 2, KEPT + 9) == {"a": 9, "b": 3 * (KEPT + 3)}
    assert again.between(0, 5) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"hours": 3}', '{"hours": {"x": {}}}', '{"hours": {"1": 2}}'])
def test_a_damaged_file_begins_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    assert Hours.read(tmp_path).sums == {}


class Counting:
    """An engine whose counters a test sets."""

    def __init__(self, *directories: Path) -> None:
        self.counters: dict[str, int] = {}
        self.directories = directories

    def info(self) -> dict[str, Any]:
        return {"disks": [{"path": str(path)} for path in self.directories]}

    def keep(self, interval_s: float = 60.0) -> HourlySums:
        return HourlySums(self, lambda: dict(self.counters), interval_s)  # type: ignore[arg-type]


def total(directory: Path) -> dict[str, int]:
    return Hours.read(directory).between(NOW - 1, NOW + 3)


def test_the_increase_is_written_while_the_engine_runs_and_at_its_end(tmp_path: Path) -> None:
    engine = Counting(tmp_path)
    engine.counters = {"misses_never_seen": 3, "answered_lookups": 4, "host_blocks": 9}
    sums = engine.keep(interval_s=0.01)
    until("the first sums", lambda: total(tmp_path) == {"misses_never_seen": 3, "answered_lookups": 4})
    time.sleep(0.1)
    assert total(tmp_path) == {"misses_never_seen": 3, "answered_lookups": 4}, "each count is added once"
    # The engine has moved to this process, and counts from zero.
    engine.counters = {"misses_never_seen": 1, "answered_lookups": 5}
    until("the next sums", lambda: total(tmp_path) == {"misses_never_seen": 4, "answered_lookups": 9})
    # It is in another process.
    engine.counters = {}
    time.sleep(0.05)
    sums.close()
    assert total(tmp_path)["answered_lookups"] == 9
    # A further process adds its own.
    engine.counters = {"misses_never_seen": 2}
    engine.keep().close()
    assert total(tmp_path) == {"misses_never_seen": 6, "answered_lookups": 9}


def test_an_engine_without_a_directory_or_with_a_disk_that_hangs_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Counting()
    alone.counters = {"misses_never_seen": 3}
    alone.keep().close()
    gone = Counting(tmp_path / "none")
    gone.counters = {"misses_never_seen": 3}
    gone.keep().close()
    assert list(tmp_path.iterdir()) == []
    answers = threading.Event()
    monkeypatch.setattr(Hours, "write", lambda *_: answers.wait(30))
    hanging = Counting(tmp_path)
    hanging.counters = {"misses_never_seen": 3}
    began = time.monotonic()
    hanging.keep().close(timeout_s=0.1)
    assert time.monotonic() - began < 5
    answers.set()


def test_a_server_leaves_the_sums_of_its_clients_lookups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "disk"
    store.mkdir(mode=0o700)
    # The store was deleted, and its sums were left.
    written(store)
    disk = ["--disk-path", str(store), "--disk-capacity", "64MiB"]
    with ServeProcess(tmp_path / "run" / "serve.sock", *disk) as server:
        options = {"server": f"unix://{server.socket}", "server_timeout_ms": 30_000, "min_load_tokens": 0}
        client = Peer(_core.Engine(options))
        until("the server", client.is_up)
        client.save(prompt("a"))
        assert client.load(prompt("a")) > 0
        assert client.load(prompt("b")) == 0
        client.close()
        assert server.stop() == 0
    found = total(store)
    assert found["misses_never_seen"] >= 1 and found["answered_lookups"] > found["misses_never_seen"]
    assert found["answered_hit_tokens"] > 0 and found["answered_tokens"] > found["answered_hit_tokens"]
    # No engine runs any more, and a start finds the file no stranger's.
    assert main.main(["explain", "--summary", "--disk-path", str(store)]) == 0
    assert "nothing found: never seen" in capsys.readouterr().out
    with ServeProcess(tmp_path / "run" / "serve.sock", *disk) as server:
        assert main.main(["explain", "--summary", "--socket", str(server.socket)]) == 0
    assert str(store) in capsys.readouterr().out


def written(directory: Path) -> None:
    hours = Hours()
    lookups, asked, device, hit = LOOKUPS
    hours.add(NOW - 27, {lookups: 9, asked: 900, "misses_timed_out": 9})
    hours.add(NOW - 25, {lookups: 10, asked: 1000, device: 500, hit: 250, "misses_evicted_host": 1})
    hours.add(NOW - 1, {lookups: 8, asked: 800, device: 100, hit: 50, "misses_evicted_host": 5, "orders_clear": 1})
    hours.write(directory)


def test_a_night_is_shown_beside_the_night_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    # The run of all tests may have passed the end of the hour in which this file was collected.
    monkeypatch.setattr("time.time", lambda: NOW * HOUR_S + 60.0)
    argv = ["explain", "--summary", "--disk-path", str(tmp_path)]
    assert main.main([*argv, "--since", "90m"]) == 0
    head, _, *table = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{tmp_path}, since ")
    assert [" ".join(line.split()) for line in table] == [
        "now a day before",
        "lookups 8 10",
        "tokens asked 800 1,000",
        "on the device 12.5 % 50.0 %",
        "found in the tiers 6.2 % 25.0 %",
        "nothing found: evicted host 5 1",
        "order: clear 1 0",
    ]
    assert main.main([*argv, "--since", "36h", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["days_before"], found["sums_before"]) == (2, {})
    assert found["sums"]["answered_lookups"] == 27
    assert [one["hour"] for one in found["hours"]] == [(NOW - ago) * HOUR_S for ago in (27, 25, 1)]
    assert found["since"] == (NOW - 35) * HOUR_S


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--since", "2h"], 2, "--since: goes with --summary only"),
        (["--summary", "--misses"], 2, "leave --request and --misses out"),
        (["--summary", "--since", "8d", "--disk-path", "HERE"], 2, "kept for 7 days"),
        (["--summary", "--since", "soon", "--disk-path", "HERE"], 2, "soon: not a duration"),
        (["--summary", "--disk-path", "/nowhere"], 1, "no engine has counted here yet"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    argv = [str(tmp_path) if one == "HERE" else one for one in argv]
    try:
        ended = main.main(["explain", *argv])
    except SystemExit as error:
        ended = int(error.code or 0)
    assert ended == code
    assert message in capsys.readouterr().err


def test_an_engine_without_a_disk_has_no_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("undercroft.cli.engines.ask", lambda _: {"info": {}})
    assert main.main(["explain", "--summary", "--socket", str(tmp_path / "a.sock")]) == 1
    assert "without disk_path" in capsys.readouterr().err
