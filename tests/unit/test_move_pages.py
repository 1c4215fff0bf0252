"""The text of the kernel, which a driver compiles on its machine: NVIDIA's assembler, which Triton brings, takes it."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

TEXT = Path(__file__).parents[2] / "rust/io/src/copy/move_pages.ptx"


@pytest.mark.parametrize("device", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_it_compiles_and_keeps_its_parameters_where_they_are(device: str, tmp_path: Path) -> None:
    triton = importlib.util.find_spec("triton")
    [package] = (triton.submodule_search_locations if triton else None) or [""]
    assembler = Path(package, "backends/nvidia/bin/ptxas")
    if not assembler.is_file():
        pytest.skip("needs Triton's ptxas")
    command = [str(assembler), "-v", f"-arch={device}", str(TEXT), "-o", str(tmp_path / "kernel")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "0 bytes stack frame, 0 bytes spill stores" in ran.stderr, "each thread would copy the table first"
