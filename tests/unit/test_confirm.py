"""Commands that remove something: asked on a terminal, refused without one, and neither with ``--yes``."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from undercroft import _core
from undercroft.cli import main

DIGEST = "3f9a1c02" * 8
FOUND = {"namespaces": [{"digest": DIGEST, "description": "one", "blocks": 7, "bytes": 4096}]}

COMMANDS: dict[str, list[tuple[list[str], str]]] = {
    # command: arguments, and the text that the question names
    "clear": [
        (["clear", "--socket", "/s", "--all"], "all blocks from unix:///s"),
        (["clear", "--socket", "/s", "--all", "--erase", "--json"], "all blocks from unix:///s"),
        (["clear", "--socket", "/s", "--namespace", DIGEST], f"all blocks of namespace {DIGEST} from unix:///s"),
        (["clear", "--socket", "/s", "--older-than", "2h"], "blocks unused for 2.0 h from unix:///s"),
    ],
    "inspect": [(["inspect", "DIR", "--drop", DIGEST[:8]], f"{DIGEST[:12]} (one): 7 blocks, 4 KiB")],
    "remote gc": [
        (
            ["remote", "gc", "s3://bucket/x", "--max-age", "3d", "--max-bytes", "1TiB"],
            "the objects not used for 3.0 d or beyond 1 TiB, the oldest first, from s3://bucket/x",
        ),
        (["remote", "gc", "file:///x", "--max-age", "3d"], "the objects not used for 3.0 d, from file:///x"),
    ],
}
CALLS = [call for calls in COMMANDS.values() for call in calls]


class RemovedError(Exception):
    """The command removes now."""


@pytest.fixture(autouse=True)
def nothing_real(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(*_: object, **__: object) -> None:
        raise RemovedError

    for name in ("operate", "drop_namespace", "remote_gc"):
        monkeypatch.setattr(_core, name, remove)
    monkeypatch.setattr(_core, "inspect", lambda _directory: FOUND)


def run(argv: list[str], place: Path) -> int:
    (place / "super").touch()
    return main.main([str(place) if one == "DIR" else one for one in argv])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("argv", "what"), CALLS)
def test_without_a_terminal_a_removal_has_to_be_confirmed(
    argv: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Even if the input holds an answer.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run(argv, tmp_path) == 2
    printed = capsys.readouterr()
    refused = f"undercroft: error: nothing was removed: there is no terminal to ask on; give --yes to remove {what}\n"
    assert (printed.out, printed.err) == ("", refused)
    with pytest.raises(RemovedError):
        run([*argv, "--yes"], tmp_path)


@pytest.mark.parametrize(("argv", "what"), CALLS)
def test_on_a_terminal_the_operator_is_asked(
    argv: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for answer in ("n", "", "yess"):
        monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
        assert run(argv, tmp_path) == 1
        printed = capsys.readouterr()
        assert printed.out == f"Remove {what}? [y/N] "
        assert printed.err == "undercroft: error: nothing was removed\n"
    for answer in ("y", "YES "):
        monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
        with pytest.raises(RemovedError):
            run(argv, tmp_path)


def test_a_dry_run_removes_nothing_and_is_not_asked_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(RemovedError):
        run(["remote", "gc", "s3://bucket/x", "--max-age", "3d", "--dry-run"], tmp_path)


def named(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command, with the commands below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below, one in action.choices.items():
                yield from named(one, f"{name} {below}".strip())
    yield name, parser


def test_every_command_that_can_be_confirmed_is_tested() -> None:
    commands = named(main.build_parser())
    assert {name for name, parser in commands if "--yes" in parser._option_string_actions} == set(COMMANDS)
