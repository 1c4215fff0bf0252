"""Each order to a running engine leaves one line of its process's log, and a count."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from core_values import Group
from served_client import until
from undercroft import _core
from undercroft.cli import main
from undercroft.config import UndercroftConfig
from undercroft.engine import open_engine
from undercroft.log import logger
from undercroft.metrics import ORDERS

HOSTILE = "a\x1b[31m\nb\u202e"
HASH = "00" * 32

COMMANDS = (
    # arguments, verb, its arguments in the line, a part of the answer
    (["clear", "--all", "--erase", "--yes"], "clear", '{"erase":true,"what":"all"}', '"order":1'),
    (["drain"], "drain", '{"cancel":false}', '"draining":true'),
    (["drain", "--cancel"], "drain", '{"cancel":true}', '"draining":false'),
    (["resize", "--host-memory", "32MiB"], "resize", '{"disk_bytes":null,"host_bytes":33554432}', '"target_bytes":3'),
    (["resize", "--host-memory", "1TiB"], "resize", '{"disk_bytes":null,"host_bytes":1099511627776}', '"error":"host_'),
    (["pin", "HASHES", "--hashes", "--id", HOSTILE], "pin", '{"hashes":1,"name":"a', '"answer":"rejected"'),
    (["unpin", "--id", HOSTILE], "unpin", '{"hashes":0,"name":"a', '"answer":"rejected"'),
    (["resize"], "", "", ""),
    (["explain"], "", "", ""),
    (["status"], "", "", ""),
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[_core.Engine]:
    options = {"host_memory": "64MiB", "socket_dir": str(tmp_path / "run")}
    engine = open_engine(UndercroftConfig.parse(options, {}))
    session = engine.register('{"model": "one"}', [Group("full", 16, 4096)], 16)
    yield engine
    session.close()
    engine.close()


def test_each_order_is_logged_once_with_its_caller_and_counted(
    engine: _core.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hashes = tmp_path / "hashes"
    hashes.write_text(json.dumps([HASH]) + "\n")
    socket = engine.arena.socket
    expected: list[tuple[str, str, str]] = []
    counts = dict.fromkeys(ORDERS, 0)

    def lines() -> list[str]:
        found = [record for record in caplog.records if "undercroft: order " in record.getMessage()]
        assert all(record.levelno == logging.INFO for record in found)
        return [record.getMessage() for record in found]

    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(caplog.handler)
    try:
        for argv, verb, arguments, answer in COMMANDS:
            main.main([str(hashes) if one == "HASHES" else one for one in argv] + ["--socket", socket])
            if verb:
                expected.append((verb, arguments, answer))
                counts[verb] += 1
            assert {name: engine.stats()[f"orders_{name}"] for name in ORDERS} == counts, argv
        until("all lines", lambda: len(lines()) >= len(expected))
    finally:
        logger.removeHandler(caplog.handler)
    # The handler of the root logger sees them, too.
    said = list(dict.fromkeys(lines()))
    assert len(said) == len(expected)
    by = f" by uid {os.getuid()}, pid {os.getpid()}: "
    for line, (verb, arguments, answer) in zip(said, expected, strict=True):
        assert line.startswith(f"undercroft: order {verb} {arguments}"), line
        assert by in line and answer in line.partition(by)[2], line
        assert line.isprintable(), line
