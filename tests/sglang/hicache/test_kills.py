"""Whenever a process is killed, no page that a later one loads has a wrong byte. ``KILLS`` says how often."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = int(os.environ.get("KILLS", "12"))
SEED = os.environ.get("SOAK_SEED", "7")
LIMIT_S = 60 + 5 * KILLS
PROGRAM = Path(__file__).with_name("killed.py")


@pytest.mark.timeout(LIMIT_S + 30)
def test_killed_processes_leave_only_right_pages(tmp_path: Path) -> None:
    # The program's children end with it, also when it takes too long.
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), str(KILLS), SEED], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ran.returncode == 0, ran.stderr
    lives = json.loads(ran.stdout.splitlines()[-1])
    done = "".join(found for found, _ in lives)
    print(f"{KILLS} kills, {len(done)} operations, {done.count('h')} of them found pages")
    assert "W" not in done, lives
    assert [status for _, status in lives] == [signal.SIGKILL] * KILLS + [0], ran.stderr
    assert any(found.startswith("h") for found, _ in lives[1:]), "none has found a page of the process before it"
    assert len(lives[-1][0]) == 60
