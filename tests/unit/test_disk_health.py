"""The log on directories that stop or start to work."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from undercroft.health import DiskHealth, NamespaceHealth
from undercroft.log import logger


class _Engine:
    def __init__(self) -> None:
        self.asked = 0
        self.disks: list[dict[str, Any]] = [{"path": "/a", "health": "good", "fault": None}]

    def info(self) -> dict[str, Any]:
        self.asked += 1
        return {"disks": self.disks}


def test_how_a_directory_was_opened_is_said_at_start(caplog: pytest.LogCaptureFixture) -> None:
    engine = _Engine()
    engine.disks[0].update(notes=["disk_path /a shrinks"])
    engine.disks.append({"path": "/b", "health": "unavailable", "fault": "Read-only file system", "notes": []})
    logger.addHandler(caplog.handler)
    try:
        health = DiskHealth(engine)  # type: ignore[arg-type]
        health.check(1)
    finally:
        logger.removeHandler(caplog.handler)
    said = list(dict.fromkeys((record.levelname, record.getMessage()) for record in caplog.records))
    assert said[0] == ("WARNING", "undercroft: disk_path /a shrinks")
    assert said[1][0] == "ERROR" and "/b cannot be used" in said[1][1] and "Read-only" in said[1][1]
    assert len(said) == 2


def test_each_change_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = _Engine()
    health = DiskHealth(engine)  # type: ignore[arg-type]
    caplog.set_level(logging.INFO, logger=logger.name)
    logger.addHandler(caplog.handler)
    try:
        asked = engine.asked
        health.check(0)
        assert engine.asked == asked
        engine.disks[0].update(health="no_writes", fault="No space left on device")
        for _ in range(3):
            health.check(1)
        engine.disks[0].update(health="failed", fault="Input/output error")
        for _ in range(3):
            health.check(1)
        engine.disks[0].update(health="good", fault=None)
        for _ in range(3):
            health.check(0)
        engine.disks[0].update(health="file_missing", fault="the file data was deleted or replaced")
        for _ in range(3):
            health.check(1)
    finally:
        logger.removeHandler(caplog.handler)
    said = list(dict.fromkeys(record.getMessage() for record in caplog.records))
    expected = ["no writes", "has failed", "works again", "the file data was deleted"]
    assert all(words in line for words, line in zip(expected, said, strict=True)), said
    assert "No space left" in said[0]
    assert "/a" in said[0]


def test_namespaces_without_an_entry_are_said_once_if_that_lasts(caplog: pytest.LogCaptureFixture) -> None:
    health = NamespaceHealth()
    logger.addHandler(caplog.handler)
    try:
        # A reset, which is durable a moment later.
        for volatile in (0, 1, 0, 1, 0):
            health.check(volatile)
        assert caplog.records == []
        for volatile in (2, 2, 2, 3, 3, 0, 1, 1):
            health.check(volatile)
    finally:
        logger.removeHandler(caplog.handler)
    said = dict.fromkeys(record.getMessage() for record in caplog.records)
    assert [text.partition(" namespaces")[0].rpartition(" ")[2] for text in said] == ["2", "3", "1"]
