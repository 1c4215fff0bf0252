"""A filesystem of its own for a cache, which a test fills, or whose writes hang."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
HANGS_S = 90
"""Writes end after this time in any case, so that a test that waits for them fails."""


@contextlib.contextmanager
def small(place: Path) -> Iterator[Path]:
    """A filesystem of 96 MiB in a new directory. Skips the test if this process may not mount one."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96m", "none", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a filesystem")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def freezable(place: Path) -> Iterator[Path]:
    """A filesystem of 96 MiB on a device of its own, for `frozen`. Skips the test if this process may not mount one."""
    place.mkdir()
    image = place.with_suffix(".image")
    with image.open("xb") as file:
        file.truncate(96 * MIB)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop,noatime", str(image), str(place)]):
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs e2fsprogs and root, to mount a filesystem on a device of its own")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def frozen(filesystem: Path) -> Iterator[None]:
    """No write ends meanwhile, and reads do. Another process ends it, also if this one is killed."""
    script = f'fsfreeze --freeze "$0" && echo frozen && timeout {HANGS_S} cat; fsfreeze --unfreeze "$0"'
    with subprocess.Popen(["sh", "-c", script, filesystem], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None and shell.stdout.readline()
        yield


@contextlib.contextmanager
def unanswered(place: Path) -> Iterator[Path]:
    """A filesystem whose server never answers: each call on it hangs until the end, as on NFS without its server."""
    place.mkdir()
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs FUSE")
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    mounted = ctypes.CDLL(None).mount(b"none", os.fsencode(place), b"fuse", 0, options)
    try:
        if mounted:
            pytest.skip("needs root, to mount a filesystem")
        yield place
    finally:
        # Without the server the kernel ends the calls.
        os.close(server)
        subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=not mounted)


def holes(file: Path) -> Iterator[tuple[int, int]]:
    """The ranges of a file that hold nothing."""
    size, at = file.stat().st_size, 0
    with file.open("rb") as opened:
        while (at := os.lseek(opened.fileno(), at, os.SEEK_HOLE) if at < size else size) < size:
            try:
                end = os.lseek(opened.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing follows
                end = size
            yield at, end
            at = end


def take_space(filesystem: Path) -> None:
    """Take all space of a filesystem, also that of the cache's slots that hold nothing."""
    data = filesystem / "cache" / "data"
    for begin, end in holes(data) if data.exists() else ():
        punch = ["fallocate", "--punch-hole", "--offset", str(begin), "--length", str(end - begin), str(data)]
        subprocess.run(punch, check=True)
    with (filesystem / "other").open("wb", buffering=0) as other:
        try:
            while True:
                other.write(bytes(MIB))
        except OSError as error:
            assert error.errno == errno.ENOSPC
