"""Texts that clients, stores and other users choose reach logs and terminals without control characters."""

from __future__ import annotations

import ast
import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import undercroft
from core_values import Group
from http_vllm import HttpVllm, serving
from undercroft import _core, log
from undercroft.cli import main, output
from undercroft.printable import printable

PACKAGE = Path(undercroft.__file__).parent
BLOCK = 16
HOSTILE = "x\nFORGED LINE\x1b[2J\x07\u202e\u2028\r\x9b31m"
"""A forged line, escape sequences of 7 and 8 bits, a bell, a change of direction, and other ends of lines."""


def assert_printable(text: str) -> None:
    """Every line is printable, and none is of the hostile text's making."""
    assert text.count("\n") == len(text.splitlines()), "another end of a line than ours"
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("FORGED"), text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain text, 100 %", "a plain text, 100 %"),
        ("größe 漢字", "größe 漢字"),
        ("a\nb\r\tc", r"a\x0ab\x0d\x09c"),
        ("\x1b[2J\x00\x7f\x9b", r"\x1b[2J\x00\x7f\x9b"),
        ("\u202e\u2028\ud800", r"\u202e\u2028\ud800"),
        ("\U000e0001", r"\U000e0001"),
        (r"\x1b", r"\x1b"),
        ("", ""),
    ],
)
def test_characters_that_are_not_printable_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def loggers() -> list[logging.Logger]:
    """Every logger of the package: `log.logger`, and those that modules make with `log.child`."""
    for path in PACKAGE.rglob("*.py"):
        if "log.child(" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    every = logging.Logger.manager.loggerDict.items()
    return [one for name, one in every if name.startswith("vllm.undercroft") and isinstance(one, logging.Logger)]


def test_every_line_of_the_log_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    every = loggers()
    assert len(every) >= 2
    for logger in every:
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger=logger.name):
            logger.info("request %s: %d %%", HOSTILE, 5)
            logger.warning(HOSTILE)
            log.LogOnce(logger)(logging.ERROR, "kind", "an error %s", HOSTILE, error=_raised())
        assert len(caplog.records) == 3, logger.name
        for record in caplog.records:
            assert_printable(caplog.handler.format(record) + "\n")
        assert caplog.records[0].getMessage() == rf"request {printable(HOSTILE)}: 5 %"
        assert caplog.text.count("Traceback (most recent call last)") == 1
        assert 'raise ValueError("reason: " + HOSTILE)' in caplog.text


def _raised() -> Exception:
    try:
        raise ValueError("reason: " + HOSTILE)
    except ValueError as error:
        return error


def test_only_the_module_of_outputs_prints() -> None:
    printers = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in {"print", "sys.stdout.write", "sys.stderr.write"}:
                printers.append(str(path.relative_to(PACKAGE)))
    assert set(printers) == {"cli/output.py"}


def test_a_table_is_as_wide_as_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("name", "n"), [(HOSTILE, 1), ("y", 2)])
    output.print_fields({"name": HOSTILE, HOSTILE: 1})
    out = capsys.readouterr().out
    assert_printable(out)
    assert len({len(line) for line in out.splitlines()[:3]}) == 1
    output.say(HOSTILE, mark="\033[32mok\033[0m")
    assert capsys.readouterr().out == f"\033[32mok\033[0m{printable(HOSTILE)}\n", "colours are this program's own"


class Place:
    """A running engine whose directory, requests, namespaces and HTTP neighbour have hostile names."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url = root, url
        self.store = root / HOSTILE
        self.none = str(root / f"none{HOSTILE}")
        self.prompts = root / f"prompts{HOSTILE}"
        self.prompts.write_text(json.dumps("a prompt"), encoding="utf-8")
        self.trace = root / f"trace{HOSTILE}"
        self.trace.write_text(HOSTILE, encoding="utf-8")
        self.model = root / f"model{HOSTILE}"
        self.model.mkdir()
        self.model.joinpath("config.json").write_text(json.dumps({"model_type": HOSTILE}), encoding="utf-8")
        self.exported = root / f"export{HOSTILE}"
        disks = [{"path": str(self.store), "capacity": 32 << 20}]
        self.engine = _core.Engine({"host_memory": 16 << 20, "disks": disks, "min_load_tokens": 0})
        description = json.dumps({"model": HOSTILE, HOSTILE: {"dtype": HOSTILE}})
        session = self.engine.register(description, [Group("full", BLOCK, 64 << 10)], BLOCK)
        other = self.engine.register('{"model": "y"}', [Group("full", BLOCK, 64 << 10)], BLOCK)
        hashes = [bytes([block]) * 32 for block in range(4)]
        session.lookup(f"cmpl{HOSTILE}", hashes)
        grant = session.begin_save("save", hashes, 4 * BLOCK)
        assert grant is not None
        session.end_transfer(grant.transfer_id, True)
        other.lookup(f"other{HOSTILE}", hashes)
        self.namespaces = session.namespace, other.namespace

    def commands(self) -> dict[str, list[list[str]]]:
        """Arguments of each command, such that it shows what others have named."""
        here = ["--disk-path", str(self.store)]
        away = ["--disk-path", self.none]
        url = ["--url", self.url]
        gone = ["--socket", self.none]
        return {
            "serve": [["--disk-path", str(self.store)], ["--host-memory", HOSTILE], ["--socket", str(self.prompts)]],
            "status": [[], here, away, gone],
            "top": [["--once"], ["--once", f"unix://{self.none}"], ["--once", self.url], ["--interval", HOSTILE]],
            "demo": [["--directory", str(self.prompts)], ["--model", HOSTILE, "--disk-capacity", HOSTILE]],
            "explain": [[], here, away, gone, ["--request", "cmpl"], ["--request", "other"], ["--request", HOSTILE]],
            "doctor": [here, ["--disk-path", str(self.prompts)], ["--remote", f"file://{self.prompts}"]],
            "check-config": [
                [json.dumps({"disk_path": str(self.store)})],
                [json.dumps({HOSTILE: 1})],
                [f"@{self.trace}"],
            ],
            "inspect": [
                [str(self.store)],
                [str(self.store), "--diff", *self.namespaces],
                [str(self.store), "--verify"],
                [self.none],
                [f"file://{self.none}"],
            ],
            "remote": [["gc", f"file://{self.root / 'remote'}{HOSTILE}", "--max-age", "1d", "--yes"], [HOSTILE]],
            "size": [[str(self.model)], [self.none]],
            "estimate": [["--trace", str(self.trace), "--model", str(self.model), "--host-memory", "1GiB"]],
            "pin": [[*url, str(self.prompts)], [*url, self.none], [*here, "--hashes", str(self.trace)]],
            "unpin": [[*url, "--id", HOSTILE], [*here, "--id", HOSTILE], [*away, "--id", "x"]],
            "warm": [[*url, str(self.prompts)], [*url, str(self.trace)]],
            "drain": [here, [*here, "--cancel"], away],
            "resize": [[*here, "--host-memory", "8MiB"], [*here, "--host-memory", HOSTILE], away],
            "export": [[*here, self.namespaces[0][:12], str(self.exported)], [*here, HOSTILE, self.none]],
            "import": [[*here, str(self.exported)], [*here, str(self.trace)], [*away, str(self.exported)]],
            "clear": [[*here, "--all", "--yes"], [*away, "--all", "--yes"], [*here, "--namespace", HOSTILE]],
        }


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        verbs = (body.get("kv_transfer_params") or {}).get("kv_hints")
        if verbs is None:
            return 500, {"error": HOSTILE}
        answers = {verb: {"answer": HOSTILE, "tokens": HOSTILE, "reason": HOSTILE} for verb in verbs}
        return 200, {"kv_transfer_params": {"kv_hints": answers}}

    with serving(HttpVllm(answer)) as url:
        made = Place(tmp_path, url)
        try:
            yield made
        finally:
            made.engine.close()


def test_no_command_passes_a_control_character_on(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """`serve` only starts where it fails."""
    commands = place.commands()
    assert set(commands) == set(main.COMMANDS)
    shown: dict[str, str] = {}
    for command, calls in commands.items():
        for arguments in calls:
            try:
                main.main([command, *arguments])
            except SystemExit as ended:
                assert ended.code, f"{command} {arguments}"
            said = capfd.readouterr()
            assert_printable(said.out)
            assert_printable(said.err)
            shown[command] = shown.get(command, "") + said.out + said.err
    silent = [command for command, text in shown.items() if "FORGED LINE" not in text]
    assert not silent, f"these show no hostile name, so they prove nothing: {silent}"
