"""`tools/gpu_check` from end to end, two ranks included, on two GPUs that are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fake_cuda

TOOLS = Path(__file__).parents[2] / "tools"
# Python reads it at start, in the processes of the ranks, too.
SITE = """
import atexit, os, pathlib, runpy, sys
sys.modules["vllm"] = None  # the check needs none
import fake_cuda
kept = runpy.run_path(str(fake_cuda.HERE / "computing" / "sitecustomize.py"))

def tell():
    violations = fake_cuda.Fake().violations()
    pathlib.Path(__file__).with_name(f"{os.getpid()}.violations").write_text(repr(violations))

atexit.register(tell)
"""


def test_the_check_finds_everything_right(tmp_path: Path) -> None:
    if (missing := fake_cuda.missing()) is not None:
        pytest.skip(missing)
    target = tmp_path / "found.json"
    environment = fake_cuda.environment()
    (tmp_path / "sitecustomize.py").write_text(SITE)
    environment["PYTHONPATH"] = f"{tmp_path}:{Path(fake_cuda.__file__).parent}"
    command = [sys.executable, str(TOOLS / "gpu_check"), "--small", "--json", str(target)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-4000:]
    assert [path.read_text() for path in tmp_path.glob("*.violations")] == ["[]"] * 3, "the check and two ranks"
    result = json.loads(target.read_text())
    assert (result["wrong"], result["errors"]) == ([], [])
    assert result["facts"]["batches by"] == "cuMemcpyBatchAsync"
    rows = {row["name"]: row["value"] for section in result["sections"] for row in section["rows"]}
    assert rows["rank 1: contexts on its own device only"] == "right"
    assert rows["the whole arena is pinned"] == "8 of 8 MiB"
    assert [section["name"] for section in result["sections"] if section["skipped"]] == []
    table = ran.stdout.splitlines()
    for section in result["sections"]:
        assert f"{section['name']} ({section['seconds']:.1f} s)" in table
        assert section["rows"]
    assert sum(section["seconds"] for section in result["sections"]) < 180
