"""`undercroft clear`: what is dropped while the engine runs, and that it stays dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from core_values import Group
from undercroft import _core
from undercroft.cli import main

BLOCK = 16
PROMPT = [bytes([block]) * 32 for block in range(4)]


def opened(directory: Path) -> _core.Engine:
    disks = [{"path": str(directory / "store"), "capacity": 32 << 20}]
    return _core.Engine({"host_memory": 16 << 20, "disks": disks, "min_load_tokens": 0})


def session_of(engine: _core.Engine, description: str) -> _core.Session:
    return engine.register(description, [Group("full", BLOCK, 64 << 10)], BLOCK)


def save(engine: _core.Engine, session: _core.Session) -> None:
    grant = session.begin_save("save", PROMPT, len(PROMPT) * BLOCK)
    assert grant is not None
    session.end_transfer(grant.transfer_id, True)
    assert engine.flush()
    assert hit(session) == 64


def hit(session: _core.Session) -> int:
    while (answer := session.lookup("asks", PROMPT)).pending:
        session.wait("asks", 1.0)
    session.finish_request("asks")
    return int(answer.tokens)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_core.Engine]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    engine = opened(tmp_path)
    yield engine
    engine.close()


def test_one_namespace_goes_for_good_and_its_session_goes_on(
    engine: _core.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = session_of(engine, "one"), session_of(engine, "other")
    save(engine, one)
    save(engine, other)
    assert main.main(["clear", "--json", "--namespace", one.namespace[:12].upper()]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["cleared"], said["durable"]) == (1, True)
    assert (hit(one), hit(other)) == (0, 64)
    engine.close()
    again = opened(tmp_path)
    assert (hit(session_of(again, "one")), hit(session_of(again, "other"))) == (0, 64)
    session = session_of(again, "one")
    save(again, session)
    again.close()
    last = opened(tmp_path)
    assert hit(session_of(last, "one")) == 64, "it was entered again"
    last.close()


def test_all_namespaces_go_and_a_second_time_there_is_nothing(
    engine: _core.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = [session_of(engine, str(number)) for number in range(9)]
    for session in sessions:
        save(engine, session)
    assert main.main(["clear", "--all"]) == 0
    assert "cleared 9 namespaces" in capsys.readouterr().out
    assert [hit(session) for session in sessions] == [0] * 9
    assert engine.stats()["disk_blocks"] == 0
    assert main.main(["clear", "--namespace", sessions[0].namespace]) == 0
    assert "cleared 0 namespaces" in capsys.readouterr().out
    for session in sessions:
        save(engine, session)
