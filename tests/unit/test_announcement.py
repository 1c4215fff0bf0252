"""How the workers find the arena before the first step."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from undercroft.config import UndercroftConfig
from undercroft.connector import announcement as module
from undercroft.connector.announcement import Announced, Announcement

ADDRESS: Any = SimpleNamespace(socket="/run/engine.sock", arena_id=7, session=2**127 + 1)


def announcement(directory: Path, engine_id: str = "engine") -> Announcement:
    return Announcement(UndercroftConfig.parse({"socket_dir": str(directory)}), engine_id)


def test_the_worker_reads_an_announcement_until_it_is_withdrawn(tmp_path: Path) -> None:
    scheduler, worker = announcement(tmp_path / "run"), announcement(tmp_path / "run")
    assert worker.read() is None
    scheduler.write(ADDRESS)
    assert worker.read() == Announced("/run/engine.sock", 7, 2**127 + 1)
    assert announcement(tmp_path / "run", "other").read() is None
    [file] = (tmp_path / "run").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    scheduler.write(ADDRESS)
    scheduler.withdraw()
    scheduler.withdraw()
    assert worker.read() is None
    assert list((tmp_path / "run").iterdir()) == []


def test_an_engine_that_is_not_there_yet_is_not_announced(tmp_path: Path) -> None:
    one = announcement(tmp_path)
    one.write(SimpleNamespace(socket="", arena_id=0, session=0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"socket": "/run", "arena_id": null, "session": 1}'])
def test_a_damaged_file_gives_no_announcement(tmp_path: Path, text: str) -> None:
    one = announcement(tmp_path)
    one.write(ADDRESS)
    [file] = tmp_path.iterdir()
    file.write_text(text)
    assert one.read() is None


def test_files_of_others_and_links_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = announcement(tmp_path)
    one.write(ADDRESS)
    own = os.geteuid()
    monkeypatch.setattr(module.os, "geteuid", lambda: own + 1)
    assert one.read() is None
    monkeypatch.undo()
    [file] = tmp_path.iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert one.read() is None
