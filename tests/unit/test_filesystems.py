"""`make test-filesystems`: who may run it, and the reasons why a filesystem is skipped."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import filesystems as tool
import pytest

PLACE = tool.Place(Path("/target"), Path("/sources"))


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("the namespace was made"))


def test_without_root_it_says_so_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a command ran"))
    with pytest.raises(SystemExit, match="2"):
        tool.main([])
    assert "mounts need root: run make test-filesystems as root" in capsys.readouterr().err


def test_an_unknown_filesystem_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.main(["xfs-512", "zfs"])
    assert "zfs: no such filesystem here. Allowed: ext4-512, ext4-4096, xfs-512" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "package"), [("xfs-4096", "xfsprogs"), ("btrfs-512", "btrfs-progs")])
def test_a_filesystem_whose_program_is_missing_is_skipped_with_its_package(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tool.Skipped, match=f"apt install {package}"):
        tool.FILESYSTEMS[name](PLACE)


class Machine:
    """Records commands, and fails those that begin with one of ``failing``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: str) -> None:
        self.ran: list[str] = []
        self.failing = failing
        monkeypatch.setattr(tool.shutil, "which", lambda _: "/sbin/mkfs")
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.ran.append(" ".join(command))
        failed = self.ran[-1].startswith(self.failing) if self.failing else False
        return subprocess.CompletedProcess(command, int(failed), "/dev/loop7\n", "not permitted" if failed else "")


def test_a_machine_without_loop_devices_skips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Machine(monkeypatch, "losetup")
    with pytest.raises(tool.Skipped, match="allows no such loop device: not permitted"):
        tool.FILESYSTEMS["ext4-4096"](tool.Place(tmp_path, tmp_path))


def test_a_loop_device_is_detached_also_after_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for failing in ((), ("mkfs.ext4",), ("mount",)):
        machine = Machine(monkeypatch, *failing)
        try:
            tool.FILESYSTEMS["ext4-4096"](tool.Place(tmp_path, tmp_path))
        except subprocess.CalledProcessError:
            assert failing
        assert machine.ran[0].startswith("losetup --find --show --sector-size=4096 ")
        assert machine.ran[-1] == "losetup --detach /dev/loop7"
        assert not [*tmp_path.iterdir()], "the image has no name any more"
