"""`make perf-gate`: its verdict, and whether the recorded figures are as new as the code that they measure."""

from __future__ import annotations

import json
from pathlib import Path

import perf_gate as gate
import pytest
from compare import BENCHES, PROGRAMS, CompareError, compare, git
from perf_gate import BASELINE, BEGIN, CHANGED_MOST, END, RESULTS, ROWS, Measured, changed, digest, digests, judge

BASE = json.loads(BASELINE.read_text(encoding="utf-8"))
ROW = Measured("disk", ("cpu",), ("share",), ("code",))


def verdicts(*rounds: tuple[float, float]) -> list[bool]:
    """Whether (cpu, share) of the rounds, against 1 and 1 of the base, are worse."""
    base = [{"cpu": 1.0, "share": 1.0}] * len(rounds)
    new = [{"cpu": cpu, "share": share} for cpu, share in rounds]
    return [one.is_worse for one in judge("disk", ROW, compare(base, new).rows)]


def test_a_figure_that_is_worse_in_every_round_fails_whichever_way_is_worse() -> None:
    assert verdicts((1.2, 0.9), (1.06, 0.9), (1.3, 0.8)) == [True, True]
    assert verdicts((0.5, 1.5), (0.6, 1.4), (0.7, 1.3)) == [False, False]


def test_five_percent_and_a_spread_around_the_base_pass() -> None:
    assert verdicts((1.04, 0.96), (1.05, 0.96), (1.04, 0.97)) == [False, False]
    assert verdicts((1.5, 0.5), (1.5, 0.5), (0.9, 1.1)) == [False, False]


def test_a_figure_that_was_not_measured_fails() -> None:
    [cpu, share] = judge("disk", ROW, compare([{"cpu": 1.0}], [{"cpu": 1.0}]).rows)
    assert (cpu.is_worse, share.is_worse) == (False, True)
    assert "not measured" in gate.lines([share])[-1]


def test_comments_do_not_make_code_new_and_statements_do(tmp_path: Path) -> None:
    def of_files() -> dict[str, str]:
        return {path: digest((tmp_path / path).read_text()) for path in gate.files(ROW, tmp_path)}

    code = tmp_path / "code"
    code.mkdir()
    (code / "a.rs").write_text("fn a() {}\n")
    (code / "b.py").write_text("b = 1\n")
    before = of_files()
    assert list(before) == ["code/a.rs", "code/b.py"]
    (code / "a.rs").write_text("// Does nothing.\n\nfn a() {}\n")
    assert changed(ROW, before, of_files(), tmp_path) == 0
    (code / "b.py").write_text("b = 2\n")
    (code / "c.py").write_text("c = 1\n")
    assert changed(ROW, before, of_files(), tmp_path) == 2 / 3


def test_a_file_that_moves_is_not_new() -> None:
    before = "use crate::a::{\n    B,\n    C,\n};\n\npub(crate) fn b() -> crate::a::C {\n    B.c()\n}\n"
    after = "use undercroft_a::B;\n\npub fn b() -> undercroft_a::C {\n    B.c()\n}\n"
    assert digest(before) == digest(after)
    assert digest(before) != digest(after.replace("B.c()", "B.d()"))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_a_benchmark_and_code_that_exists(name: str) -> None:
    row = ROWS[name]
    assert row.bench in BENCHES | PROGRAMS
    for place in row.code:
        assert (gate.ROOT / place).exists(), place
    assert gate.files(row)


def test_the_baseline_is_a_commit_of_this_history() -> None:
    """Compared in whole: a wrong hash with the right first digits was taken for the commit by everybody but git."""
    commits = [BASE["base"], *([BASE["measured"]["commit"]] if BASE["measured"] else [])]
    try:
        if git("rev-parse", "--is-shallow-repository") != "false":
            pytest.skip("a clone without its whole history")
    except CompareError:
        pytest.skip("no clone of git")
    for commit in commits:
        git("merge-base", "--is-ancestor", commit, "HEAD")


def test_recorded_figures_are_as_new_as_the_code_that_they_measure() -> None:
    measured = BASE["measured"]
    if measured is None:
        pytest.skip("no figures are recorded: make perf-gate RECORD=1, on an idle machine")
    now = digests()
    old = {name: changed(row, measured["code"], now) for name, row in ROWS.items()}
    stale = {name: f"{share:.0%} of the files have changed" for name, share in old.items() if share > CHANGED_MOST}
    assert not stale, f"figures of {measured['commit'][:8]} are out of date; make perf-gate RECORD=1 on an idle machine"
    record = RESULTS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert f"commit {measured['commit'][:8]} against {BASE['base'][:8]}" in record
    assert all(f"| {name} |" in record for name in ROWS)


def test_a_record_names_the_commit_its_baseline_and_the_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(gate, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(gate, "git", lambda *_: "a" * 40)
    gate.RESULTS.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    found = judge("disk", ROW, compare([{"cpu": 1.0, "share": 0.9}], [{"cpu": 0.5, "share": 0.9}]).rows)
    gate.record({"base": "old"}, "b" * 40, found)
    written = json.loads(gate.BASELINE.read_text())
    assert (written["base"], written["measured"]["commit"]) == ("b" * 40, "a" * 40)
    assert written["measured"]["code"] == digests()
    text = gate.RESULTS.read_text()
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "commit aaaaaaaa against bbbbbbbb" in text
    assert "| disk | cpu | 1 | 0.5 | 0.50, 0.50, 0.50 |" in text
