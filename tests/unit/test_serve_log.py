"""The log of `undercroft serve` as JSON: each line is an object, whatever the server has to say."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from serve_process import ServeProcess, run


def objects(text: str) -> list[dict[str, Any]]:
    """The lines of a log. Fails if a line is something else than an object."""
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        assert one.keys() - {"traceback"} == {"time", "level", "logger", "message"}
        assert timedelta() <= datetime.now(UTC) - datetime.fromisoformat(one["time"]) < timedelta(minutes=5)
        assert one["level"] in ("debug", "info", "warning", "error")
        assert one["logger"].split(".")[0] in ("vllm", "py")
    return found


@pytest.mark.parametrize("how", ["flag", "file"])
def test_each_line_of_a_server_is_an_object(how: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    file.write_text('{"log_format": "json"}')
    given = ["--log-format", "json"] if how == "flag" else ["--config", str(file)]
    with ServeProcess(tmp_path / "s.sock", "--metrics", "0", *given, UNDERCROFT_HOST_MEMROY="1") as server:
        assert server.stop() == 0
        log = objects("\n".join([*server.printed, server.process.stdout.read()]))
        assert server.process.stderr.read() == ""
    assert [one["level"] for one in log if "UNDERCROFT_HOST_MEMROY" in one["message"]] == ["warning"]
    messages = [one["message"] for one in log if one["level"] == "info"]
    assert any("ready on unix://" in one for one in messages)
    assert messages[-1] == "undercroft: stopping"


def test_the_error_with_which_a_server_ends_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    path.write_text("")
    text = run("serve", "--socket", str(path))
    done = run("serve", "--socket", str(path), "--log-format", "json")
    (line,) = objects(done.stdout)
    assert (done.returncode, done.stderr, line["level"]) == (2, "", "error")
    assert (text.returncode, text.stdout, text.stderr) == (2, "", f"{line['message']}\n")
    assert "traceback" not in line


FAULTY = """
import sys, threading, warnings
from undercroft.cli import main, serve

def open_engine(*_):
    warnings.warn("old", stacklevel=1)
    one = threading.Thread(target=lambda: {}["no such\\nkey"], name="other")
    one.start()
    one.join()
    raise RuntimeError("first line\\nsecond")

serve.open_engine = open_engine
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_fault_is_an_object_with_its_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAULTY, "serve", "--socket", str(tmp_path / "s"), "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    warning, thread, last = objects(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert (warning["level"], warning["logger"]) == ("warning", "py.warnings")
    assert thread["message"] == "undercroft: the thread other has ended with an error"
    assert last["message"].startswith("undercroft: error: RuntimeError: first line")
    for one, error in ((thread, "KeyError"), (last, "RuntimeError")):
        lines = one["traceback"].splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1].startswith(error)
