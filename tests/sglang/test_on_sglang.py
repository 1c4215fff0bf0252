"""The back end of SGLang's HiCache with SGLang's own classes: every file of `hicache`, in a process of its own.

SGLang's wheel is fetched once (40 MB); without a network, and without it, the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import sglang_packages

import inner_pytest

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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    inner_pytest.passes(HICACHE / file, environment, tmp_path / "inner", timeout=550)
