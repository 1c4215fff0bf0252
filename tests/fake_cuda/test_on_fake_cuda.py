"""Every file of tests/gpu on a machine without a GPU, in a process of its own that sees two fake ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fake_cuda

GPU = Path(__file__).parents[1] / "gpu"
FILES = sorted(path.name for path in GPU.glob("test_*.py"))


@pytest.mark.timeout(700)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs on the GPU")
@pytest.mark.parametrize("file", FILES)
def test_gpu_tests_pass(file: str, tmp_path: Path) -> None:
    if (missing := fake_cuda.missing()) is not None:
        pytest.skip(missing)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(GPU / file)]
    command += [f"--basetemp={tmp_path / 'inner'}"]
    ran = subprocess.run(command, env=fake_cuda.environment(), capture_output=True, text=True, timeout=650)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-4000:]
    assert " passed" in ran.stdout, ran.stdout
