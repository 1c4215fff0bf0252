"""Tests that run in a process of their own, with another environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

SHOWN = 12_000
"""Characters of a failed run's output that are shown, beside the names of its failed tests and their errors."""
WIDE = {"COLUMNS": "400"}
"""pytest cuts the lines of its summary to the width of the terminal."""


def passes(file: Path, environment: Mapping[str, str], scratch: Path, *arguments: str, timeout: float = 650) -> None:
    """Run a file of tests, of which one passes at least and none fails. ``scratch``: its temporary directory."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-n", "0", "-p", "no:cacheprovider", str(file)]
    command += [f"--basetemp={scratch}", *arguments]
    ran = subprocess.run(command, env={**environment, **WIDE}, capture_output=True, text=True, timeout=timeout)
    if ran.returncode != 0 or " passed" not in ran.stdout:
        pytest.fail(_failure(ran), pytrace=False)


def _failure(ran: subprocess.CompletedProcess[str]) -> str:
    """The failed tests first, then their errors, then the end of everything: logs are longer than what is shown."""
    lines = ran.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))] or [
        f"pytest ended with {ran.returncode}"
    ]
    errors = "\n".join(line for line in lines if line.startswith("E  "))
    return "\n".join((*failed, errors[:SHOWN], ran.stdout[-SHOWN:], ran.stderr[-SHOWN // 3 :]))
