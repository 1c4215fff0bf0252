"""The runner of `tools/gpu_day`: limits, order, exit code, and results that are written at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from gpu_day.bundle import unpack, write
from gpu_day.runner import run
from gpu_day.steps import STEPS, Day, Step

RIGHT = "pass"
WRONG = "raise SystemExit(1)"
CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


def step(name: str, code: str, limit_s: float = 60.0, *, shows_bytes: bool = True) -> Step:
    return Step(name, limit_s, lambda day: [sys.executable, "-c", code], shows_bytes)


def results(out: Path, *steps: Step, total_s: float = 600.0) -> tuple[int, list[tuple[str, str]]]:
    environment = dict(os.environ)
    code = run(Day(out), steps, {False: environment, True: environment}, total_s)
    summary = json.loads((out / "day.json").read_text())
    assert summary["exit"] == code
    assert summary["complete"] is True
    return code, [(one["name"], one["bytes"]) for one in summary["steps"]]


def test_a_step_that_hangs_is_ended_with_its_children_and_the_next_ones_run(tmp_path: Path) -> None:
    child = tmp_path / "child"
    hangs = f"""
import subprocess, sys
one = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open({str(child)!r}, "w").write(str(one.pid))
print("begun", flush=True)
one.wait()
"""
    code, found = results(tmp_path, step("hangs", hangs, 5.0, shows_bytes=False), step("next", RIGHT))
    assert (code, found) == (0, [("hangs", ""), ("next", "right")])
    [first, _] = json.loads((tmp_path / "day.json").read_text())["steps"]
    assert first["ended"] == "ended at its limit of 5 s"
    assert first["tail"] == "begun\n"
    try:
        state = Path("/proc", child.read_text(), "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return
    assert state == "Z", "only its parent, which is gone, has not asked for its status"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([RIGHT, RIGHT], 0, id="right"),
        pytest.param([WRONG, RIGHT], 1, id="wrong bytes, and the rest runs"),
        pytest.param([CRASHES, RIGHT], 2, id="a check that did not end shows nothing"),
        pytest.param([CRASHES, WRONG], 1, id="wrong bytes count more"),
    ],
)
def test_the_exit_code_is_the_bytes(steps: list[str], expected: int, tmp_path: Path) -> None:
    code, found = results(tmp_path, *(step(str(nth), one) for nth, one in enumerate(steps)))
    assert code == expected
    assert len(found) == len(steps)


def test_a_figure_that_could_not_be_measured_is_not_wrong(tmp_path: Path) -> None:
    assert results(tmp_path, step("figures", WRONG, shows_bytes=False))[0] == 0


def test_steps_get_the_time_that_is_left(tmp_path: Path) -> None:
    hangs = step("hangs", "import signal; signal.pause()")
    assert results(tmp_path, hangs, step("last", RIGHT), total_s=2.0) == (
        2,
        [("hangs", "not shown"), ("last", "not shown")],
    )


def test_results_are_written_after_each_step(tmp_path: Path) -> None:
    looks = (
        f"import json; [one] = json.load(open({str(tmp_path / 'day.json')!r}))['steps']; assert one['bytes'] == 'right'"
    )
    assert results(tmp_path, step("first", RIGHT), step("looks", looks))[0] == 0


@pytest.mark.parametrize(
    ("report", "status", "verdict"),
    [
        ({"wrong": [], "sections": [1]}, 1, "right"),
        ({"wrong": ["far: block 3"], "sections": [1]}, 1, "wrong"),
        ({"wrong": ["far: block 3"], "sections": [1]}, None, "wrong"),
        (None, 0, "not shown"),
    ],
)
def test_the_checks_own_report_says_whether_bytes_are_wrong(
    report: object, status: int | None, verdict: str, tmp_path: Path
) -> None:
    if report is not None:
        (tmp_path / "check.json").write_text(json.dumps(report))
    [check] = [one for one in STEPS if one.report]
    assert check.verdict(tmp_path, status) == verdict


def test_the_report_of_an_earlier_day_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "check.json").write_text(json.dumps({"wrong": [], "sections": [1]}))
    check = Step("check", 60.0, lambda day: [sys.executable, "-c", RIGHT], shows_bytes=True, report="check.json")
    assert results(tmp_path, check) == (2, [("check", "not shown")])


def test_no_two_steps_have_one_name_and_bytes_come_before_figures() -> None:
    names = [one.name for one in STEPS]
    assert len(set(names)) == len(names)
    shows = [one.shows_bytes for one in STEPS[1:]]
    assert shows == sorted(shows, reverse=True)
    assert STEPS[1].report


def test_a_bundle_is_unpacked_once_and_again_after_it_was_built_anew(tmp_path: Path) -> None:
    made, site, target = tmp_path / "made", tmp_path / "site", tmp_path / "bundle.zip"
    (made / "package").mkdir(parents=True)
    (made / "package/one.py").write_text("x = 1")
    write(made, target)
    unpack(target, site)
    (site / "package/one.py").write_text("changed")
    unpack(target, site)
    assert (site / "package/one.py").read_text() == "changed"
    newer = site.stat().st_mtime + 10
    os.utime(target, (newer, newer))
    unpack(target, site)
    assert (site / "package/one.py").read_text() == "x = 1"
