"""What a failed run of tests in another process shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import inner_pytest

FILE = """
import pytest

@pytest.fixture
def broken():
    raise ZeroDivisionError("a fixture's error")

def test_that_fails():
    print("a log\\n" * 10_000)
    assert [1, 2, 3] == [1, 2, 4], "hits"

def test_that_cannot_start(broken):
    pass

def test_that_passes():
    pass
"""


def run(tmp_path: Path, *arguments: str) -> None:
    inner_pytest.passes(tmp_path / "test_inner.py", os.environ, tmp_path / "inner", *arguments, timeout=120)


def test_the_failed_tests_are_named_first_however_long_the_logs_are(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(FILE)
    with pytest.raises(pytest.fail.Exception) as failed:
        run(tmp_path)
    first, second, *rest = str(failed.value).splitlines()
    assert first.startswith("FAILED ")
    assert "::test_that_fails - AssertionError: hits" in first
    assert second.startswith("ERROR ")
    assert "::test_that_cannot_start - ZeroDivisionError: a fixture's error" in second
    assert "E       assert [1, 2, 3] == [1, 2, 4]" in rest[:4]
    assert len(str(failed.value)) < 3 * inner_pytest.SHOWN


def test_a_run_fails_if_no_test_has_passed(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(FILE)
    run(tmp_path, "-k", "passes")
    with pytest.raises(pytest.fail.Exception, match="pytest ended with 5"):
        run(tmp_path, "-k", "nothing")
