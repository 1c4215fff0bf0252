"""The tool for aarch64 names a remedy where Debian's packages cannot be had."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/aarch64.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("aarch64", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PLACE", tmp_path)
    monkeypatch.setattr(module, "KEYS", TOOL)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    return module


def test_packages_that_apt_cannot_fetch_end_with_a_remedy(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        failed = "install" in command
        if failed and options.get("check"):
            raise subprocess.CalledProcessError(100, command)
        return subprocess.CompletedProcess(command, 100 if failed else 0)

    monkeypatch.setattr(tool.subprocess, "run", run)
    with pytest.raises(SystemExit, match=f"cannot fetch.*rustup target add {tool.TARGET}"):
        tool._unpack(("rustc",), tmp_path / "debian")
    assert not (tmp_path / "debian").exists()
