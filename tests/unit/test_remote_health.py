"""What the log says of a remote store, and of one that fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from undercroft.config import UndercroftConfig
from undercroft.connector.groups import GroupRegistration
from undercroft.connector.remote_use import why_limited
from undercroft.engine import start_line
from undercroft.errors import ConfigError
from undercroft.health import RemoteHealth
from undercroft.identity.start import check_seed

URL = "s3://bucket/prefix"


class Engine:
    """Reports the health that the test sets."""

    def __init__(self) -> None:
        self.health = "unknown"
        self.asked = 0

    def info(self) -> dict[str, Any]:
        self.asked += 1
        fault = "the store denies access (SignatureDoesNotMatch)" if self.health == "failed" else None
        return {"remote": {"url": URL, "health": self.health, "fault": fault, "advice": "check the credentials"}}


def test_a_failure_is_logged_once_with_the_remedy_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    health = RemoteHealth(engine)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, logger="undercroft"):
        health.check(0)
        assert engine.asked == 0, "nothing is asked while all is well"
        engine.health = "failed"
        for _ in range(3):
            health.check(1)
        engine.health = "good"
        for _ in range(3):
            health.check(0)
    [failed, works] = caplog.records
    assert failed.levelno == logging.ERROR
    for words in (URL, "SignatureDoesNotMatch", "check the credentials", "not affected"):
        assert words in failed.getMessage()
    assert works.getMessage() == f"undercroft: remote {URL} works again"


def test_random_block_hashes_are_refused_with_a_remote_store() -> None:
    config = UndercroftConfig.parse({"remote": URL}, {})
    with pytest.raises(ConfigError, match=f"{URL}.*random.*PYTHONHASHSEED"):
        check_seed("a random seed", config, is_shared=False)
    check_seed("a random seed", UndercroftConfig.parse({}, {}), is_shared=False)


def test_models_that_the_store_does_not_serve_in_full_get_a_reason() -> None:
    def said(*groups: tuple[str, int], dropped: int = 0) -> str | None:
        registered = [GroupRegistration(kind, tokens, 4096 if tokens else 0, 0) for kind, tokens in groups]
        return why_limited(registered, 16, dropped)

    assert said(("full", 16)) is None
    assert said(("full", 16), ("ignored", 0), dropped=16) is None
    assert said(("full", 16), ("state", 1024)) is None
    assert "no full attention" in (said(("sliding_window", 16), ("state", 16)) or "")
    assert "after 65 blocks only" in (said(("full", 16), ("state", 1040)) or "")
    assert "nothing is read" in (said(("full", 16), ("sliding_window", 16), dropped=16) or "")


def test_the_start_line_names_the_store() -> None:
    info = {"host_memory": 1 << 30, "remote": {"url": URL}}
    assert f"; remote {URL}; " in start_line(info, "0123456789abcdef")
    assert "remote" not in start_line(info | {"remote": None}, "0123456789abcdef")
