"""Checks of ``undercroft doctor`` that concern the kernel, limits, memory and disk."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import re
import resource
import shutil
import tempfile
from pathlib import Path

from undercroft.capacity import INDEX_BYTES_PER_NODE
from undercroft.cli.doctor.check import Check
from undercroft.config import UndercroftConfig
from undercroft.engine import disks
from undercroft.units import format_size

# Smallest transfer that O_DIRECT takes on every common device.
DIRECT_BYTES = 4096
LOW_MEMORY_BYTES = 4 << 30
# A block of a small model: the more of them, the larger the index.
INDEX_EXAMPLE_BYTES = 128 << 10
# The first with MADV_COLLAPSE for shared memory.
LINUX_COLLAPSE = (6, 1)
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


def checks(disk_path: str | None) -> list[Check]:
    """All system checks, in the order in which they are shown."""
    found = [memlock(), huge_pages(), socket_dir()]
    with contextlib.suppress(ImportError):  # the software checks report a core that cannot be loaded
        found += [io_uring(), memory()]
    if disk_path is not None:
        found.append(direct_io(Path(disk_path)))
        with contextlib.suppress(ImportError):
            found += store(Path(disk_path))
    return found


def io_uring() -> Check:
    """Whether this process may create a ring: the core tries, as the engine does."""
    from undercroft import _core

    kernel = f"kernel {platform.release()}"
    reason = _core.probe_io_uring()
    if reason is None:
        return Check("io_uring", "ok", f"works ({kernel})")
    advice = "The engine uses a thread pool instead, which is slower. "
    if _read("/proc/sys/kernel/io_uring_disabled") in ("1", "2"):
        advice += "The administrator has disabled io_uring: set the sysctl kernel.io_uring_disabled to 0."
    else:
        advice += (
            "io_uring needs Linux 5.11, and in a container a seccomp profile that allows io_uring_setup, "
            "io_uring_enter and io_uring_register."
        )
    return Check("io_uring", "warn", f"{reason} ({kernel})", advice)


def memlock() -> Check:
    """The limit on locked memory, which registering the arena with io_uring or the GPU needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "unlimited")
    if os.geteuid() == 0:
        return Check("memlock", "ok", f"{format_size(soft)} (not enforced for root)")
    advice = "Disk buffers are not registered with io_uring, a little slower: ulimit -l unlimited, LimitMEMLOCK="
    return Check(
        "memlock", "warn", format_size(soft), advice + "infinity (systemd), or --ulimit memlock=-1 (containers)."
    )


def huge_pages() -> Check:
    """Huge pages for the arena: reserved ones, or transparent ones (since Linux 6.1 on request)."""
    meminfo = _meminfo()
    free = meminfo.get("HugePages_Free", 0) * meminfo.get("Hugepagesize", 0)
    shmem = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = shmem.partition("[")[2].partition("]")[0]
    found = f"{format_size(free)} reserved and free; shmem THP: {chosen or 'not supported'}"
    version = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    on_request = chosen == "never" and version >= LINUX_COLLAPSE
    if free or on_request or chosen in ("always", "advise", "within_size", "force"):
        return Check("huge pages", "ok", found + (" (the engine requests huge pages explicitly)" if on_request else ""))
    advice = (
        "The engine uses small pages, with more TLB misses and slower transfers to disk. Set "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled to advise."
    )
    return Check("huge pages", "warn", found, advice)


def memory() -> Check:
    """Memory that host_memory can be taken from, as the engine itself counts it."""
    from undercroft import _core

    try:
        available = _core.available_memory()
    except _core.UndercroftError as error:
        return Check("memory", "warn", str(error), "Set host_memory in bytes.")
    found = f"{format_size(available)} available, limits of the control group included"
    if available < LOW_MEMORY_BYTES:
        return Check("memory", "warn", found, "A small host tier: set host_memory to what this machine can spare.")
    return Check("memory", "ok", found)


def socket_dir() -> Check:
    """The directory of the socket from which workers get the arena."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if os.access(base, os.W_OK | os.X_OK):
        return Check("socket directory", "ok", f"below {base}")
    return Check(
        "socket directory",
        "fail",
        f"{base} cannot be written",
        "Set socket_dir to a writable directory.",
    )


def direct_io(path: Path) -> Check:
    """A write with O_DIRECT into the directory itself, or into its nearest parent that exists."""
    directory = path.absolute()
    while not directory.is_dir():
        if directory.exists():
            return Check("disk path", "fail", f"{directory} is not a directory", "Name a directory as disk_path.")
        directory = directory.parent
    free = format_size(shutil.disk_usage(directory).free)
    where = f"{path} ({_filesystem(directory)}, {free} free)"
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".undercroft-doctor-") as probe:
            try:
                fd = os.open(probe.name, os.O_WRONLY | os.O_DIRECT)
            except OSError as error:
                return _no_direct_io(where, error)
            with mmap.mmap(-1, DIRECT_BYTES) as page:
                try:
                    os.pwrite(fd, page, 0)
                except OSError as error:
                    return _no_direct_io(where, error)
                finally:
                    os.close(fd)
    except OSError as error:
        return Check(
            "disk path",
            "fail",
            f"{where}: {error.strerror}",
            "Let the user that runs vLLM write there.",
        )
    return Check("disk path", "ok", f"O_DIRECT works on {where}")


def store(path: Path) -> list[Check]:
    """What opening the directory as `undercroft serve` does would come to. Changes nothing."""
    from undercroft import _core

    config = UndercroftConfig.parse({"disk_path": str(path)})
    options = {"disks": disks(config), "on_disk_error": config.on_disk_error, "share": True}
    options["disk_on_other_version"] = config.disk_on_other_version
    (found,) = _core.examine(options)
    checks = []
    if found["error"] is not None and not found["starts"]:
        checks.append(Check("disk store", "fail", found["error"], "undercroft does not start with this directory."))
    elif found["error"] is not None:
        advice = "undercroft starts without this directory and tries it again later."
        if "is in use by" in found["error"]:
            advice = "vLLM uses the engine that has it open; `undercroft serve` does not start on it."
        checks.append(Check("disk store", "warn", found["error"], advice))
    elif found["notes"]:
        advice = "See disk_capacity and disk_on_other_version."
        checks.append(Check("disk store", "warn", "; ".join(found["notes"]), advice))
    else:
        kind = "a store that is kept" if found["is_kept"] else "room for a new store"
        index = format_size(found["capacity"] // INDEX_EXAMPLE_BYTES * INDEX_BYTES_PER_NODE)
        said = (
            f"{path}: {kind}, {format_size(found['capacity'])} for blocks; their index takes {index} of memory if "
            f"blocks have {format_size(INDEX_EXAMPLE_BYTES)} (`undercroft size` tells for a model)"
        )
        checks.append(Check("disk store", "ok", said))
    if _filesystem(_existing(path)) in MEMORY_FILESYSTEMS:
        advice = "Its blocks are host memory a second time: give host_memory more instead, and a disk_path on NVMe."
        checks.append(Check("disk device", "warn", f"{path} is in memory", advice))
    return checks


def _existing(path: Path) -> Path:
    """The path, or the nearest one above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _no_direct_io(where: str, error: OSError) -> Check:
    found = f"no O_DIRECT on {where}: {error.strerror}"
    return Check("disk path", "warn", found, "The engine uses buffered IO. Prefer ext4 or XFS on NVMe.")


def _filesystem(directory: Path) -> str:
    """Type of the filesystem that holds the directory, from the mount with the longest matching path."""
    best, kind = "", "unknown filesystem"
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4]
        if directory.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def _meminfo() -> dict[str, int]:
    """/proc/meminfo, sizes in bytes and counts as they are."""
    found = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found


def _read(path: str) -> str:
    """A small file of the kernel's; empty where it does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
