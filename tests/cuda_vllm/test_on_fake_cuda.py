"""Real engines of vLLM's CUDA wheel over the fake CUDA: every file of `cuda_engines`, in a process of its own.

The wheel of the installed version is fetched once (340 MB); without a network, and without it, the tests are skipped.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import cuda_wheels
import overlay
import pytest
import torch

import fake_cuda
import fake_device
import inner_pytest

ENGINES = Path(__file__).with_name("cuda_engines")
FILES = sorted(path.name for path in ENGINES.glob("test_*.py"))


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Folder of the unpacked wheel."""
    if (missing := fake_cuda.missing()) is not None:
        pytest.skip(missing)
    version = overlay.installed_version()
    try:
        return cuda_wheels.unpacked(version)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"vLLM's CUDA wheel {version} cannot be fetched: {error}")


@pytest.mark.vllm
@pytest.mark.timeout(700)
@pytest.mark.skipif(torch.cuda.is_available(), reason="engines run on the GPU itself")
@pytest.mark.parametrize("file", FILES)
def test_engines_on_the_fake_give_the_right_tokens(file: str, wheel: Path, tmp_path: Path) -> None:
    inner_pytest.passes(ENGINES / file, fake_device.environment(wheel), tmp_path / "inner")
