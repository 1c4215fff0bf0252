"""Checks of ``undercroft doctor`` that concern the kernel, limits, memory and disk."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import resource
import shutil
import tempfile
from pathlib import Path

from undercroft.cli.doctor import Check
from undercroft.cli.output import bytes_text

# The same number on every architecture that Linux has had since io_uring came.
SYS_IO_URING_SETUP = 425
# Size of `struct io_uring_params`.
IO_URING_PARAMS_BYTES = 120
# Smallest transfer that O_DIRECT takes on every common device.
DIRECT_BYTES = 4096
LOW_MEMORY_BYTES = 4 << 30
# The first with MADV_COLLAPSE for shared memory.
LINUX_COLLAPSE = (6, 1)
STORE_FILES = ("super", "table", "data")


def checks(disk_path: str | None) -> list[Check]:
    """All system checks, in the order in which they are shown."""
    found = [io_uring(), memlock(), huge_pages(), memory(), socket_dir()]
    if disk_path is not None:
        found.append(direct_io(Path(disk_path)))
        found += store_files(Path(disk_path))
    return found


def io_uring() -> Check:
    """Whether this process may make a ring: tried, not guessed from the kernel's version."""
    params = (ctypes.c_uint8 * IO_URING_PARAMS_BYTES)()
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(SYS_IO_URING_SETUP, 4, ctypes.byref(params))
    kernel = f"kernel {platform.release()}"
    if fd >= 0:
        os.close(fd)
        return Check("io_uring", "ok", f"works ({kernel})")
    code = ctypes.get_errno()
    found = f"refused: {os.strerror(code)} ({kernel})"
    fallback = "The thread pool is used instead: right, but slower. "
    if code == errno.ENOSYS:
        advice = "This kernel has no io_uring; Linux 5.10 or newer has."
    elif _read("/proc/sys/kernel/io_uring_disabled") in ("1", "2"):
        advice = "Switched off by the administrator: sysctl kernel.io_uring_disabled=0."
    elif code == errno.EPERM:
        advice = "A seccomp profile forbids it, as in most containers: allow io_uring_setup, _enter and _register."
    else:
        advice = "Check the limits of this process (ulimit -a)."
    return Check("io_uring", "warn", found, fallback + advice)


def memlock() -> Check:
    """Locked memory: what registering the arena with the ring or the GPU may need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "unlimited")
    if os.geteuid() == 0:
        return Check("memlock", "ok", f"{bytes_text(soft)}, which does not bind root")
    advice = "Disk buffers are not registered with io_uring (a little slower): ulimit -l unlimited, LimitMEMLOCK="
    return Check(
        "memlock", "warn", bytes_text(soft), advice + "infinity (systemd), or --ulimit memlock=-1 (containers)."
    )


def huge_pages() -> Check:
    """Huge pages for the arena: reserved ones, or transparent ones, which Linux 6.1 gives on request."""
    meminfo = _meminfo()
    free = meminfo.get("HugePages_Free", 0) * meminfo.get("Hugepagesize", 0)
    shmem = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = shmem.partition("[")[2].partition("]")[0]
    found = f"{bytes_text(free)} reserved and free; transparent for shared memory: {chosen or 'not offered'}"
    version = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    on_request = chosen == "never" and version >= LINUX_COLLAPSE
    if free or on_request or chosen in ("always", "advise", "within_size", "force"):
        return Check("huge pages", "ok", found + (" unless asked for, which the engine does" if on_request else ""))
    advice = (
        "Small pages work, with more TLB misses and slower transfers to disk. Set "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled to advise."
    )
    return Check("huge pages", "warn", found, advice)


def memory() -> Check:
    """Memory that host_memory can be taken from, with a cgroup's limit counted in."""
    available = _meminfo().get("MemAvailable", 0)
    found = f"{bytes_text(available)} available"
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) - int(used) < available:
        available = max(0, int(limit) - int(used))
        found = f"{bytes_text(available)} available within the cgroup's limit of {bytes_text(int(limit))}"
    if available < LOW_MEMORY_BYTES:
        return Check("memory", "warn", found, "Little room for a host tier: set host_memory to what can be spared.")
    return Check("memory", "ok", found)


def socket_dir() -> Check:
    """Where the socket goes from which workers get the arena."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if os.access(base, os.W_OK | os.X_OK):
        return Check("socket directory", "ok", f"below {base}")
    return Check("socket directory", "fail", f"{base} cannot be written", "Set socket_dir to a directory of this user.")


def direct_io(path: Path) -> Check:
    """A write with O_DIRECT into the directory itself, or into its nearest parent that exists."""
    directory = path.absolute()
    while not directory.is_dir():
        if directory.exists():
            return Check("disk path", "fail", f"{directory} is not a directory", "Name a directory as disk_path.")
        directory = directory.parent
    free = bytes_text(shutil.disk_usage(directory).free)
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
            "disk path", "fail", f"{where}: {error.strerror}", "The user that runs vLLM must be able to write."
        )
    return Check("disk path", "ok", f"O_DIRECT works on {where}")


def store_files(path: Path) -> list[Check]:
    """Whether a directory that holds a store holds all of it; nothing to say of one that holds none."""
    missing = [name for name in STORE_FILES if not (path / name).is_file()]
    if len(missing) == len(STORE_FILES):
        return []
    if not missing:
        return [Check("disk store", "ok", f"{path} has all its files")]
    advice = "An engine that has it open loses it when it ends. Stop the engine, delete the directory, start again."
    return [Check("disk store", "fail", f"{path} lacks {', '.join(missing)}: deleted", advice)]


def _no_direct_io(where: str, error: OSError) -> Check:
    found = f"no O_DIRECT on {where}: {error.strerror}"
    return Check("disk path", "warn", found, "Buffered IO is used, through the page cache. Prefer ext4 or XFS on NVMe.")


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
