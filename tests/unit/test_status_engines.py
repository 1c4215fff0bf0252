"""`undercroft status` finds engines without being told their sockets."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from undercroft import _core
from undercroft.cli import main, sockets, status


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_core.Engine]]:
    """Two engines, each with a directory, whose sockets are in this user's directory for them."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(status, "INTERVAL_S", 0.01)
    (tmp_path / "run").mkdir(mode=0o700)
    found = []
    for number in range(2):
        disks = [{"path": str(tmp_path / f"store{number}"), "capacity": 32 << 20}]
        found.append(_core.Engine({"host_memory": (24 + number * 8) << 20, "disks": disks, "share": True}))
    yield found
    for engine in found:
        engine.close()


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main.main(["status", "--json", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_embedded_engine_is_found_by_its_directory(
    embedded: list[_core.Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, engine in enumerate(embedded):
        found = shown(capsys, "--disk-path", str(tmp_path / f"store{number}"))
        assert found["pid"] == os.getpid()
        assert found["stats"]["host_capacity_bytes"] == engine.stats()["host_capacity_bytes"]


def test_all_engines_of_the_user_are_listed_and_one_alone_is_shown(
    embedded: list[_core.Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A dead process left its socket behind.
    (tmp_path / "run" / "undercroft" / "1-00.sock").touch()
    assert len(shown(capsys)["engines"]) == 2
    for argv in (["status", "--watch", "1"], ["explain"]):
        assert main.main(argv) == 2
        assert "2 engines run; say which: --socket" in capsys.readouterr().err
    assert main.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(any(f"store{number}" in line and "unix://" in line for line in lines) for number in range(2))
    embedded[0].close()
    found = shown(capsys)

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("time.sleep", interrupt)
        assert main.main(["status", "--watch", "1", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["socket"] == found["socket"]
    assert found["stats"]["host_capacity_bytes"] == embedded[1].stats()["host_capacity_bytes"]
    embedded[1].close()
    for command in ("status", "explain"):
        assert main.main([command]) == 1
        error = capsys.readouterr().err
        assert f"no engine answers in {tmp_path / 'run' / 'undercroft'};" in error
        assert "--disk-path" in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no engine has ever used this directory"),
        ("12\n", "no engine has this directory open now"),
        (
            "12\n/nowhere/12-00.sock\n",
            "listens at /nowhere/12-00.sock, which does not exist here: that engine has ended",
        ),
    ],
)
def test_status_reports_a_directory_that_no_engine_has_open(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "lock").write_text(text)
    assert main.main(["status", "--disk-path", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


def test_status_reports_a_directory_that_this_user_may_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **_: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    # Tests may run as root, who may read everything.
    monkeypatch.setattr(Path, "read_text", refused)
    assert main.main(["status", "--disk-path", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "Permission denied" in said
    assert "as the user of the engine" in said
    assert "no engine" not in said


def test_a_socket_may_be_given_as_it_is_printed() -> None:
    assert sockets.absolute_path("unix:///run/x.sock") == sockets.absolute_path("/run/x.sock") == "/run/x.sock"
