"""The `swap_blocks_batch` of vLLM's CUDA wheels over the fake CUDA, called as undercroft calls it.

`make test-cuda-wheels` fetches the extensions (340 MB for each version, once) and names them here; skipped without.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fake_cuda

LIBRARIES = os.environ.get("UNDERCROFT_CUDA_LIBRARIES", "").split()
PROBE = Path(__file__).with_name("operator_probe.py")


@pytest.mark.skipif(not LIBRARIES, reason="needs vLLM's CUDA extensions: make test-cuda-wheels")
@pytest.mark.parametrize("library", LIBRARIES or [""], ids=lambda library: Path(library).parent.name)
def test_vllms_operator_takes_our_arrays(library: str) -> None:
    if (missing := fake_cuda.missing()) is not None:
        pytest.skip(missing)
    environment = fake_cuda.environment(own_device=1)
    environment["PYTHONPATH"] = str(PROBE.parent)
    ran = subprocess.run(
        [sys.executable, str(PROBE), library], env=environment, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-8000:]
    assert ran.stdout.endswith("everything was copied\n")
