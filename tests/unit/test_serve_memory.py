"""`undercroft serve` gives the memory of ended sessions back."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks import Client

from serve_process import ServeProcess
from undercroft.cli.serve import SESSIONS_TRIMMED, SessionMemory


@pytest.mark.server
@pytest.mark.timeout(60)
def test_a_server_gives_back_the_memory_of_sessions_that_have_come_and_gone(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "s", "--log-level", "debug") as server:
        for number in range(SESSIONS_TRIMMED):
            Client.registered(str(server.socket), b"model %d" % number).socket.close()
        line = next(line for line in server.process.stdout if "gave back" in line)
        assert f"gave back the memory of {SESSIONS_TRIMMED} ended sessions" in line


def test_memory_is_given_back_once_when_the_last_of_a_crowd_has_ended() -> None:
    trims: list[int] = []
    memory = SessionMemory(lambda _: trims.append(ended))
    for ended in (0, 3, SESSIONS_TRIMMED, 2 * SESSIONS_TRIMMED):
        memory.check(ended)
        assert not trims, "the crowd is still ending"
    for ended in (2 * SESSIONS_TRIMMED, 2 * SESSIONS_TRIMMED, 3 * SESSIONS_TRIMMED - 1, 3 * SESSIONS_TRIMMED - 1):
        memory.check(ended)
    assert trims == [2 * SESSIONS_TRIMMED]
    for ended in (3 * SESSIONS_TRIMMED, 3 * SESSIONS_TRIMMED):
        memory.check(ended)
    assert trims == [2 * SESSIONS_TRIMMED, 3 * SESSIONS_TRIMMED]
