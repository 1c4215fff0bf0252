"""The package's loggers: where they stand in the tree of loggers, and that a lasting error is logged once."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import undercroft
from undercroft import log

PACKAGE = Path(undercroft.__file__).parent


def test_only_the_log_module_makes_loggers() -> None:
    """Every logger is then `log.logger` or a child of it: vLLM configures no other tree."""
    assert log.logger.name == "vllm.undercroft"
    assert log.logger.parent is not None
    makers = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func if isinstance(node, ast.Call) else None
            called = getattr(name, "attr", getattr(name, "id", None))
            if called in {"getLogger", "getChild", "init_logger"}:
                makers.append(str(path.relative_to(PACKAGE)))
    assert set(makers) == {"log.py"}


def test_loggers_of_loaded_modules_are_below_vllm() -> None:
    from undercroft import health
    from undercroft.connector import connector
    from undercroft.connector.observe import prometheus
    from undercroft.connector.worker import worker
    from undercroft.device import copy_stream, pinning
    from undercroft.threshold import policy

    modules = (connector, health, prometheus, worker, copy_stream, pinning, policy)
    loggers = [value for one in modules for value in vars(one).values() if isinstance(value, logging.Logger)]
    assert len(loggers) >= 4
    assert all(f"{logger.name}.".startswith("vllm.undercroft.") for logger in loggers)


def test_each_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    private = logging.getLogger("test.log_once")
    log_once = log.LogOnce(private)
    error = ValueError("reason")
    for number in range(3):
        log_once(logging.ERROR, "a", "first %d", number, error=error)
        log_once(logging.WARNING, ("b", ValueError), "second")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "first 0"),
        ("WARNING", "second"),
    ]
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].filename == Path(__file__).name
    log.LogOnce(private)(logging.ERROR, "a", "another owner")
    assert len(caplog.records) == 3
