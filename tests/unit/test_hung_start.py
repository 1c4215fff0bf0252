"""A start on a directory whose filesystem hangs ends in time, and says for which directory it waits."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from full_filesystem import freezable, frozen, unanswered
from serve_process import COMMAND, ServeProcess
from undercroft.identity.weights import Digests
from undercroft.log import logger
from undercroft.patience import within

LIMIT_S = 30
"""For which a start waits for a directory."""


@contextlib.contextmanager
def is_frozen(place: Path) -> Iterator[Path]:
    with freezable(place) as filesystem, frozen(filesystem):
        yield filesystem


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("hanging", [is_frozen, unanswered])
def test_a_server_starts_without_a_directory_that_hangs_or_refuses_to(
    hanging: Callable[[Path], contextlib.AbstractContextManager[Path]], tmp_path: Path
) -> None:
    # The kernel ends no process with a call on a frozen filesystem, so that is thawed first.
    with contextlib.ExitStack() as processes, hanging(tmp_path / "filesystem") as filesystem:
        directory = filesystem / "cache"
        disk = ["--disk-path", str(directory), "--disk-capacity", "64MiB"]
        command = [*COMMAND, "serve", "--socket", str(tmp_path / "refuses"), "--host-memory", "64MiB", *disk]
        began = time.monotonic()
        refuses = processes.enter_context(
            subprocess.Popen(
                [*command, "--on-disk-error", "refuse"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        processes.callback(refuses.kill)
        server = processes.enter_context(ServeProcess(tmp_path / "serves", *disk))
        assert time.monotonic() - began >= LIMIT_S
        said = "\n".join(server.printed)
        assert refuses.stdout is not None
        lines = iter(refuses.stdout.readline, "")
        output = next(line for line in lines if "has not answered" in line or "ready" in line)
    assert f"waited 5 s for the filesystem of disk_path {directory}" in said
    assert f"disk {directory} cannot be used now" in said
    assert f"disk_path {directory}: its filesystem has not answered for {LIMIT_S} s" in output
    assert "choose another disk_path" in output


@pytest.mark.server
@pytest.mark.slow
def test_a_directory_in_use_is_named_although_its_filesystem_is_frozen(tmp_path: Path) -> None:
    # Else the second process would go on without the first one's cache, and take the directory when that ends.
    with freezable(tmp_path / "filesystem") as filesystem:
        disk = ["--disk-path", str(filesystem / "cache"), "--disk-capacity", "64MiB"]
        sizes = ["--host-memory", "64MiB", "--on-disk-error", "refuse"]
        with ServeProcess(tmp_path / "first", *disk) as first:
            with frozen(filesystem):
                second = subprocess.Popen(
                    [*COMMAND, "serve", "--socket", str(tmp_path / "second"), *disk, *sizes],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                assert second.stdout is not None
                output = next(
                    line for line in iter(second.stdout.readline, "") if "disk_path" in line or "ready" in line
                )
            second.kill()
            second.wait()
            assert f"process {first.process.pid}" in output and "in use" in output, output


def test_work_on_a_file_that_hangs_is_given_up_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    release = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, tmp_path / "file", release.wait)
    release.set()
    assert f"the filesystem of {tmp_path / 'file'} has not answered" in caplog.text
    assert within(30.0, tmp_path, lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        within(30.0, tmp_path, (tmp_path / "missing").read_bytes)


def test_a_panic_in_work_on_a_file_is_raised_at_once(tmp_path: Path) -> None:
    class Panic(BaseException):
        pass

    def panics() -> None:
        raise Panic

    with pytest.raises(Panic):
        within(0.5, tmp_path, panics)


def test_digests_whose_file_hangs_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with unanswered(tmp_path / "filesystem") as filesystem:
        monkeypatch.setattr("undercroft.identity.weights.LIMIT_S", 0.2)
        digests = Digests(filesystem / "weights.json")
        began = time.monotonic()
        found = digests.of_files([tmp_path / "model.safetensors"], "full")
        digests.save()
        assert time.monotonic() - began < 20
    assert found == Digests().of_files([tmp_path / "model.safetensors"], "full")
