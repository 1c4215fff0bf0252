"""`undercroft demo` without its vLLM: what it refuses, what it judges, and what it leaves behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from undercroft.cli import demo, main
from undercroft.demo import demonstration
from undercroft.demo.demonstration import COLD, WARM_DISK, WARM_HOST, Demo, Row, judge
from undercroft.demo.server import Answer


def row(label: str, *, tokens: tuple[int, ...] = (1, 2), **sources: int) -> Row:
    return Row(label, "chat", Answer(0.25, list(tokens), 100, sum(sources.values())), sources)


GOOD = [row(COLD), row(WARM_HOST, host=96), row(WARM_DISK, disk=96)]


def test_equal_tokens_from_each_tier_are_no_problem() -> None:
    assert judge(GOOD) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [*GOOD[:2], row(WARM_DISK, tokens=(1, 3), disk=96)],
            "restarted, chat: tokens [1, 3] instead of [1, 2]",
        ),
        ([*GOOD[:2], row(WARM_DISK, host=96)], "no tokens came from disk"),
        ([GOOD[0], row(WARM_HOST), GOOD[2]], "no tokens came from host (usage says 0 cached)"),
    ],
)
def test_another_token_and_a_tier_that_gave_nothing_are_problems(rows: list[Row], said: str) -> None:
    [found] = judge(rows)
    assert said in found


def test_without_vllm_the_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main.main(["demo"]) == 2
    said = capsys.readouterr().err
    assert sys.executable in said
    assert "pip install 'undercroft[vllm]'" in said


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories of demonstrations, which run no server."""
    found: list[Path] = []

    def run(one: Demo) -> list[Row]:
        found.append(one.place)
        assert (one.place / "cache").is_dir()
        return GOOD

    monkeypatch.setattr(demonstration.Demo, "_model", lambda *_: [])
    monkeypatch.setattr(demonstration.Demo, "run", run)
    return found


def test_a_temporary_directory_is_removed_and_a_given_one_is_kept(places: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "somebody's").touch()
    assert main.main(["demo"]) == 0
    assert main.main(["demo", "--directory", str(tmp_path)]) == 0
    assert not places[0].parent.exists()
    assert places[1] == tmp_path / demo.NAME
    assert (tmp_path / "cache" / "somebody's").exists()


def test_json_has_the_rows(places: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["problems"]) == (True, [])
    assert found["rows"][2] == {
        "request": WARM_DISK,
        "kind": "chat",
        "prompt_tokens": 100,
        "ttft_s": 0.25,
        "cached_tokens": {"disk": 96},
        "generated_tokens": "the same",
    }


def test_a_problem_is_exit_code_1(
    places: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demonstration.Demo, "run", lambda _: [*GOOD[:2], row(WARM_DISK)])
    assert main.main(["demo"]) == 1
    shown = capsys.readouterr()
    assert "FAILED: warm: disk, restarted, chat: no tokens came from disk" in shown.err
    assert "warm: host memory" in shown.out
