"""Every file of tests/gpu on a machine without a GPU, in a process of its own that sees two fake ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fake_cuda
import inner_pytest

GPU = Path(__file__).parents[1] / "gpu"
FILES = sorted(path.name for path in GPU.glob("test_*.py"))


@pytest.mark.timeout(700)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs on the GPU")
@pytest.mark.parametrize("file", FILES)
def test_gpu_tests_pass(file: str, tmp_path: Path) -> None:
    if (missing := fake_cuda.missing()) is not None:
        pytest.skip(missing)
    inner_pytest.passes(GPU / file, fake_cuda.environment(), tmp_path / "inner", "-x")


def test_the_files_that_need_no_vllm_are_collected_without_it(tmp_path: Path) -> None:
    """As on a rented machine that has PyTorch and a GPU only."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['vllm'] = None\n")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--collect-only", str(GPU)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert "test_bytes_are_right_on_slow_streams" in ran.stdout
    assert "test_captures.py" in ran.stdout
    assert "vLLM is not installed: test_counts.py, test_sleep.py, test_two_ranks.py are left out" in ran.stdout
