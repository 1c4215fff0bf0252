"""The back end of SGLang's HiCache with SGLang's own classes: every file of `hicache`, in a process of its own.

SGLang's wheel is fetched once (40 MB); without a network, and without it, the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_packages

HICACHE = Path(__file__).with_name("hicache")
FILES = sorted(path.name for path in HICACHE.glob("test_*.py"))


@pytest.fixture(scope="session")
def packages() -> Path:
    """Folder of SGLang and what it imports."""
    try:
        return sglang_packages.unpacked()
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"SGLang {sglang_packages.VERSION} cannot be fetched: {error}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES)
def test_sglang_keeps_its_pages_in_undercroft(file: str, packages: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(HICACHE / file)]
    command += [f"--basetemp={tmp_path / 'inner'}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert ran.returncode == 0, ran.stdout[-12000:] + ran.stderr[-4000:]
    assert " passed" in ran.stdout, ran.stdout
