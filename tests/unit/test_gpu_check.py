"""`tools/gpu_check` without a GPU: its output for given findings, and its parts on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_check import borders, correctness, interference, ranks, report, rig, run, speed
from gpu_check.report import Section
from torch.multiprocessing.reductions import StorageWeakRef

from undercroft.device import factory
from undercroft.device.api import DeviceCopier, Job

CPU = rig.Rig(torch.device("cpu"), small=True)
FOUND = (
    Section("correctness", 1.5, (report.right("LBHNC", True), report.right("BLHNC", True))),
    Section("speed", 2.0, (report.at_least("share of saves", 0.981, 0.97), report.at_most("slowdown", 3.5, 2, "%"))),
    Section("two ranks", 0.0, skipped="there is one device"),
)


def test_the_table_names_each_finding_its_goal_and_its_verdict() -> None:
    lines = report.as_table({"device": "H100"}, FOUND).splitlines()
    words = [line.split() for line in lines if line]
    assert words[0] == ["device", "H100"]
    assert ["LBHNC", "right", "right", "ok"] in words
    assert ["share", "of", "saves", "0.981", ">=", "0.97", "ok"] in words
    assert ["slowdown", "3.5", "%", "<=", "2", "missed"] in words
    assert ["not", "run:", "there", "is", "one", "device"] in words
    goal = {line.index(">=") for line in lines if ">=" in line} | {line.index("<=") for line in lines if "<=" in line}
    assert len(goal) == 1, "columns are aligned"


def test_the_json_has_every_finding_and_lists_the_wrong_ones() -> None:
    bad = (*FOUND, Section("more", 0.1, (report.right("bytes", False, "block 3"),)), Section("last", 0, error="hung"))
    result = json.loads(json.dumps(report.as_json({"device": "H100"}, bad)))
    assert result["format"] == report.FORMAT
    assert result["facts"] == {"device": "H100"}
    assert result["sections"][1]["rows"][0] == {
        "name": "share of saves",
        "value": 0.981,
        "unit": "",
        "goal": ">= 0.97",
        "ok": True,
        "must": False,
    }
    assert result["goals_missed"] == ["speed: slowdown"]
    assert result["wrong"] == ["more: bytes"]
    assert result["errors"] == ["last: hung"]
    assert "block 3" in report.as_table({}, bad)


def test_only_wrong_or_missing_results_are_an_error() -> None:
    assert report.exit_code(FOUND) == 0
    assert report.exit_code([Section("a", 0, (report.right("bytes", False),))]) == 1
    assert report.exit_code([Section("a", 0, error="hung")]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "found.json"
    assert run.main(["--json", str(target)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: PyTorch")
    assert "NVIDIA GPU" in err or "CUDA build" in err
    assert not target.exists()


def test_amd_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    reason = run.why_not("cuda")
    assert reason is not None and "ROCm" in reason


def test_all_parts_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "deep" / "found.json"
    assert run.main(["--device", "cpu", "--small", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert (result["wrong"], result["errors"]) == ([], [])
    assert len(result["sections"]) == 12
    assert result["complete"] is True
    assert all(section["rows"] for section in result["sections"]), "a part found nothing"
    out, err = capsys.readouterr()
    assert "correctness" in out and str(target) in out
    assert "correctness: LBHNC" in err, "progress goes to the other stream"


def test_a_part_that_ends_the_process_leaves_the_earlier_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang(_: rig.Rig) -> list[report.Row]:
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "check", hang)
    target = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        run.main(["--device", "cpu", "--small", "--json", str(target)])
    result = json.loads(target.read_text())
    assert [section["name"] for section in result["sections"]] == ["correctness", "bytes in a large cache"]
    assert result["complete"] is False


def test_a_device_that_is_slow_gets_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = rig.Rig(torch.device("cpu"))
    assert len(list(patient.rounds(20, 3))) == 20
    monkeypatch.setattr(rig, "TOTAL_S", -1.0)
    assert len(list(patient.rounds(20, 3))) == rig.FEWEST_ROUNDS
    assert len(list(patient.rounds(1, 1))) == 1


class Mistaken:
    """A copier that makes mistakes."""

    def __init__(self, inner: DeviceCopier, mistake: str) -> None:
        self.inner = inner
        self.mistake = mistake

    def submit(self, to_arena: bool, jobs: Sequence[Job]) -> list[int]:
        changed = []
        for ticket, groups in jobs:
            [copy] = groups
            blocks = copy.block_ids
            if self.mistake == ("save" if to_arena else "load"):
                blocks = np.roll(blocks, 1)
            if self.mistake == "forgets" and not to_arena:
                changed.append(Job(ticket, [replace(copy, block_ids=blocks[1:], offsets=copy.offsets[1:])]))
            else:
                changed.append(Job(ticket, [replace(copy, block_ids=blocks)]))
        return self.inner.submit(to_arena, changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("mistake", "found"),
    [("save", "other bytes were saved"), ("load", "bytes after the load"), ("forgets", "bytes after the load")],
)
def test_wrong_bytes_are_found_and_the_rest_is_measured(
    mistake: str, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make(*args: Any) -> Any:
        return Mistaken(factory.make_copier(*args), mistake)

    monkeypatch.setattr(rig, "make_copier", make)
    target = tmp_path / "found.json"
    assert run.main(["--device", "cpu", "--small", "--json", str(target)]) == 1
    result = json.loads(target.read_text())
    of_correctness = [name for name in result["wrong"] if name.startswith("correctness: ")]
    assert len(of_correctness) == len(result["sections"][0]["rows"]) > 0
    assert all(found in row["value"] for row in result["sections"][0]["rows"])
    assert [section["name"] for section in result["sections"] if section["skipped"]] == []
    assert "speed" in [section["name"] for section in result["sections"] if section["rows"]]


def test_a_copy_that_fails_ends_its_part_and_not_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, inner: DeviceCopier) -> None:
            self.inner = inner

        def poll(self) -> list[Any]:
            return [ended._replace(ok=False) for ended in self.inner.poll()]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    monkeypatch.setattr(rig, "make_copier", lambda *args: Failing(factory.make_copier(*args)))
    section = run.run_part(CPU, "speed", speed.check)
    assert section.error == "RuntimeError: a copy failed; the log above says why"


def test_a_rank_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "RANKS", 1)
    monkeypatch.setattr(ranks.sys, "executable", "/bin/false")
    [row] = ranks.check(CPU)
    assert (row.name, row.ok, row.must) == ("rank 0", False, True)
    assert "ended with 1" in str(row.value)


def test_copies_beside_decode_steps_never_cease_and_never_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """Ends at most one job between two steps."""

        def __init__(self, inner: DeviceCopier) -> None:
            self.inner = inner
            self.ended: list[Any] = []

        def poll(self) -> list[Any]:
            self.ended += self.inner.poll()
            now, self.ended = self.ended[:1], self.ended[1:]
            return now

        def drain(self) -> None:
            self.inner.drain()
            self.inner.poll()
            self.ended.clear()

        def submit(self, to_arena: bool, jobs: Sequence[Job]) -> list[int]:
            queued = self.inner.submit(to_arena, jobs)
            self.inner.drain()
            self.ended += self.inner.poll()
            return queued

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    under_way: list[int] = []
    copiers: list[Slow] = []

    def make(*args: Any) -> Any:
        copiers.append(Slow(factory.make_copier(*args)))
        return copiers[-1]

    def step(_: interference.Decode) -> float:
        under_way.append(len(copiers[-1].ended))
        return 1.0

    monkeypatch.setattr(rig, "make_copier", make)
    monkeypatch.setattr(interference.Decode, "step", step)
    interference.decode(CPU)
    assert set(under_way) == {0, interference.JOBS}, "steps alone, and steps beside as many jobs as ever"


def test_an_error_beside_launches_is_not_lost() -> None:
    def fail() -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        interference.launches(CPU, fail)


@pytest.mark.parametrize("part", [borders.far, borders.sweep, interference.decode, speed.check])
def test_a_part_has_one_cache_at_a_time(
    part: Callable[[rig.Rig], list[report.Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache takes up to 60 % of the device's memory."""
    made: list[StorageWeakRef] = []
    original = rig.synthetic_cache

    def make(*args: Any) -> Any:
        assert all(earlier.expired() for earlier in made), "an earlier cache is still there"
        cache = original(*args)
        made.append(StorageWeakRef(cache.pages[0].untyped_storage()))
        return cache

    monkeypatch.setattr(rig, "synthetic_cache", make)
    part(CPU)
    assert len(made) > 1


def test_a_round_trip_leaves_other_blocks_alone() -> None:
    with rig.copying(CPU, "LBHNC", correctness.LAYERS, 4096, 12, 12) as one:
        assert correctness.round_trip(one, 12, seed=3) == ""


@pytest.mark.parametrize("mistake", ["save", "load"])
def test_wrong_bytes_far_in_a_large_cache_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "make_copier", lambda *args: Mistaken(factory.make_copier(*args), mistake))
    rows = borders.far(CPU)
    assert [row.name for row in rows if row.ok] == []
    assert {row.name.rpartition(" at ")[2] for row in rows} == {"the start", "2^20 bytes", "the end"}


def test_lost_copies_of_many_batches_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "make_copier", lambda *args: Mistaken(factory.make_copier(*args), "load"))
    [row] = [row for row in borders.batches(CPU) if row.must]
    assert not row.ok
