"""Run the Rust tests of the disk tier on one filesystem after the other: `make test-filesystems`, as root.

The filesystems are ext4, xfs and btrfs on loop devices with sectors of 512 and of 4,096 bytes, tmpfs, overlayfs, and
ext4 on a device that has less space than it says. Names given as arguments select some of them. A filesystem that this
machine cannot have is skipped, with the reason.

All mounts are in a mount namespace of this process, and a loop device is detached as soon as it is mounted. So the
kernel removes both when this process and its tests have ended, whatever has ended them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Sparse. xfs is 300 MB at least.
DEVICE_BYTES = 2 << 30
THIN_BYTES, THIN_SPACE = 256 << 20, 40 << 20
PACKAGES = {"ext4": "e2fsprogs", "xfs": "xfsprogs", "btrfs": "btrfs-progs"}
THIN_TEST = "space::a_device_that_runs_out_of_space_costs_blocks_and_no_byte"
# Programs of tests, and the names of the tests that use files. The two others use files in every test.
FILTERS = {
    "undercroft_io": ("disk::", "features::", "files::", "raw::", "ring::"),
    "io_conformance": (),
    "disk_tier": (),
}
LIMIT_S = 240


class Skipped(Exception):  # noqa: N818 (no error)
    """This machine cannot have the filesystem; with the reason."""


@dataclass(frozen=True)
class Place:
    """Directories that a filesystem is mounted on: those in which the tests make their files."""

    target: Path
    """For integration tests, and `TMPDIR`."""
    sources: Path
    """For unit tests, which use their crate's directory as one on a real disk."""


def run(*command: str | Path) -> str:
    """The output of a command. Raises CalledProcessError, after its output has been printed."""
    found = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if found.returncode:
        print(f"{' '.join(map(str, command))}: {found.stderr.strip() or found.stdout.strip()}", file=sys.stderr)
        found.check_returncode()
    return found.stdout.strip()


def require(kind: str) -> None:
    """Raise Skipped if there is no program that makes such a filesystem."""
    if shutil.which(f"mkfs.{kind}") is None:
        raise Skipped(f"mkfs.{kind} is not installed; on Debian and Ubuntu: apt install {PACKAGES[kind]}")


@contextmanager
def loop_device(directory: Path, size: int, sector: int) -> Iterator[str]:
    """A loop device over a sparse file. It disappears at its last use after the end of the context."""
    with tempfile.NamedTemporaryFile(dir=directory) as image:
        os.truncate(image.name, size)
        attach = ["losetup", "--find", "--show", f"--sector-size={sector}", image.name]
        found = subprocess.run(attach, capture_output=True, text=True)
        if found.returncode:
            raise Skipped(f"this machine allows no such loop device: {found.stderr.strip()}")
    device = found.stdout.strip()
    try:
        yield device
    finally:
        run("losetup", "--detach", device)


def mount(kind: str, source: str, target: Path, *options: str) -> None:
    """Mount a filesystem. Raises Skipped if the kernel does not know it."""
    try:
        run("mount", "-t", kind, *options, source, target)
    except subprocess.CalledProcessError:
        if kind not in Path("/proc/filesystems").read_text().split():
            raise Skipped(f"this kernel has no {kind}") from None
        raise


def on_device(kind: str, sector: int) -> Callable[[Place], None]:
    """Mounts a new filesystem on a loop device with such sectors."""

    def prepare(place: Place) -> None:
        require(kind)
        with loop_device(place.target, DEVICE_BYTES, sector) as device:
            run(f"mkfs.{kind}", "-q", device)
            mount(kind, device, place.target)

    return prepare


def in_memory(place: Place) -> None:
    """Mounts a tmpfs."""
    mount("tmpfs", "none", place.target, "-o", f"size={DEVICE_BYTES}")


def overlay(place: Place) -> None:
    """Mounts an overlayfs whose layers are on ext4."""
    on_device("ext4", 512)(place)
    layers = {name: place.target / name for name in ("lowerdir", "upperdir", "workdir")}
    for layer in layers.values():
        layer.mkdir()
    mount("overlay", "none", place.target, "-o", ",".join(f"{name}={layer}" for name, layer in layers.items()))


def thin(place: Place) -> None:
    """Mounts ext4 on a device whose space ends before its bytes do."""
    require("ext4")
    mount("tmpfs", "none", place.target, "-o", f"size={THIN_SPACE}")
    with loop_device(place.target, THIN_BYTES, 512) as device:
        run("mkfs.ext4", "-q", device)
        mount("ext4", device, place.target)


FILESYSTEMS: dict[str, Callable[[Place], None]] = {
    **{f"{kind}-{sector}": on_device(kind, sector) for kind in ("ext4", "xfs", "btrfs") for sector in (512, 4096)},
    "tmpfs": in_memory,
    "overlayfs": overlay,
    "thin": thin,
}


def built() -> tuple[dict[str, Path], Path]:
    """Build the tests. Returns their programs, and the directory of the files of integration tests."""
    build = ["cargo", "test", "--no-run", "--quiet", "--message-format=json"]
    build += [
        "--package=undercroft-io",
        "--package=undercroft-driver",
        "--lib",
        "--test=io_conformance",
        "--test=disk_tier",
    ]
    found = subprocess.run(build, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in found.stdout.splitlines()]
    programs = {one["target"]["name"]: Path(one["executable"]) for one in messages if one.get("executable")}
    metadata = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--format-version=1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    target = Path(json.loads(metadata.stdout)["target_directory"]) / "tmp"
    target.mkdir(exist_ok=True)
    return programs, target


def tests_of(name: str, programs: dict[str, Path]) -> list[tuple[Path, str]]:
    """The tests for a filesystem, as programs and names."""
    found = []
    for program, filters in FILTERS.items():
        selection = ["--ignored", "--exact", THIN_TEST] if name == "thin" else filters
        listed = run(programs[program], "--list", "--format=terse", *selection)
        names = [line.removesuffix(": test") for line in listed.splitlines() if line.endswith(": test")]
        ignored = "" if name == "thin" else run(programs[program], "--list", "--format=terse", "--ignored")
        found += [(programs[program], one) for one in names if f"{one}: test" not in ignored.splitlines()]
    return found


def tested(name: str, programs: dict[str, Path], place: Place) -> tuple[int, list[str]]:
    """Run the tests in the mounted directories. Returns their number, and the names of those that failed.

    Each test has a process of its own: a child that another test has just forked would hold the locks of this test.
    """
    environment = os.environ | {"TMPDIR": str(place.target)}

    def passes(test: tuple[Path, str]) -> bool:
        program, one = test
        command = [program, "--exact", "--include-ignored", one]
        try:
            found = subprocess.run(
                command, cwd=place.sources, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            print(f"{one} had not ended after {LIMIT_S} seconds", flush=True)
            return False
        if found.returncode:
            print(found.stdout, found.stderr, flush=True)
        return not found.returncode

    tests = tests_of(name, programs)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            passed = [*pool.map(passes, tests)]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return len(tests), [one for (_, one), ok in zip(tests, passed, strict=True) if not ok]


def on_each(names: list[str]) -> int:
    """Test on each filesystem, and print a line for each. Returns the exit status."""
    programs, target = built()
    place = Place(target, ROOT / "rust/io")
    status = 0
    for name in names:
        print(f"== {name}", flush=True)
        try:
            try:
                FILESYSTEMS[name](place)
                run("mount", "--bind", place.target, place.sources)
                count, failed = tested(name, programs, place)
            finally:
                for directory in (place.sources, place.target):
                    while os.path.ismount(directory):
                        run("umount", "--lazy", directory)
        except Skipped as skipped:
            print(f"{name}: SKIPPED: {skipped}", flush=True)
            continue
        status |= bool(failed) or not count
        print(f"{name}: {count - len(failed)} of {count} tests passed", *failed, sep="\n  FAILED: ", flush=True)
    return status


def main(argv: list[str] | None = None) -> int:
    """Read the arguments, and test in a mount namespace."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FILESYSTEMS)} (all)")
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(FILESYSTEMS):
        parser.error(f"{', '.join(sorted(unknown))}: no such filesystem here. Allowed: {', '.join(FILESYSTEMS)}")
    if os.geteuid() != 0:
        parser.error("mounts need root: run make test-filesystems as root, with cargo on PATH")
    if not args.in_namespace:
        command = ["unshare", "--mount", "--propagation=private", sys.executable, __file__, "--in-namespace"]
        os.execvp(command[0], [*command, *args.names])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return on_each(args.names or list(FILESYSTEMS))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
