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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from undercroft.capacity import INDEX_BYTES_PER_NODE
from undercroft.cli.doctor.check import Check
from undercroft.config import UndercroftConfig
from undercroft.engine import disks
from undercroft.errors import ConfigError, UndercroftError
from undercroft.sizing import resolve_sizes
from undercroft.units import format_size

# Smallest transfer with O_DIRECT that every common device supports.
DIRECT_BYTES = 4096
LOW_MEMORY_BYTES = 4 << 30
# Bytes of a small model's block. The index grows with the number of blocks.
INDEX_EXAMPLE_BYTES = 128 << 10
# The first version with MADV_COLLAPSE for shared memory.
LINUX_COLLAPSE = (6, 1)
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
LAYERED_FILESYSTEMS = ("overlay", "aufs", "fuse-overlayfs")
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse.sshfs", "fuse.s3fs")


def checks(config: UndercroftConfig, role: str) -> Iterator[Check]:
    """All system checks, in the order in which they are shown. ``role``: "vllm" or "serve"."""
    yield memlock()
    yield huge_pages()
    yield socket_dir()
    with contextlib.suppress(ImportError):  # the software checks report a core that does not load
        yield io_uring()
        yield memory()
        yield host_memory(config)
    for path in map(Path, config.disk_path):
        yield direct_io(path)
        yield from device(path)
    if config.disk_path:
        with contextlib.suppress(ImportError):
            yield from stores(config, role)


def io_uring() -> Check:
    """Whether this process may create a ring. The core tries it in the same way as the engine."""
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
    """Huge pages for the arena: reserved pages, or transparent pages (on request since Linux 6.1)."""
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
    """The memory that is available for host_memory, by the engine's own count."""
    from undercroft import _core

    try:
        available = _core.available_memory()
    except _core.UndercroftError as error:
        return Check("memory", "warn", str(error), "Set host_memory in bytes.")
    group = _core.limiting_group()
    found = f"{format_size(available)} available" + (f", by the limit of the control group {group}" if group else "")
    if available < LOW_MEMORY_BYTES:
        return Check(
            "memory", "warn", found, "A small host tier: set host_memory to as much as this machine can spare."
        )
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
    where = f"{path} ({_mount(directory)[1]}, {free} free)"
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


def host_memory(config: UndercroftConfig) -> Check:
    """Whether the host tier has room, by the rule of an engine's start."""
    try:
        sizes = resolve_sizes(config)
    except UndercroftError as error:
        return Check("host memory", "fail", str(error).removeprefix("undercroft: "), "Choose another host_memory.")
    return Check("host memory", "ok", f"{config.host_memory} is {format_size(sizes.host_memory)}")


def stores(config: UndercroftConfig, role: str) -> Iterator[Check]:
    """The result of opening the directories as vLLM or `undercroft serve` does. Changes nothing."""
    from undercroft import _core

    options = {"disks": disks(config), "on_disk_error": config.on_disk_error, "share": role == "vllm"}
    options |= {"disk_on_other_version": config.disk_on_other_version, "key_file": config.key_file}
    try:
        found = _core.examine(options)
    except ConfigError as error:
        yield Check("key file", "fail", str(error), "undercroft does not start with this key file.")
        return
    if config.key_file:
        yield Check("key file", "ok", f"{config.key_file}: only this user reads it, and it holds keys")
    for store in found:
        yield _store(store)


def _store(found: dict[str, Any]) -> Check:
    error = found["error"]
    if error is not None and not found["starts"]:
        return Check("disk store", "fail", error, _refused_advice(found["path"], error))
    if error is not None:
        advice = "undercroft starts without this directory and tries it again later."
        if "is in use by" in error:
            advice = "vLLM uses the engine that has it open; `undercroft serve` does not start on it."
        return Check("disk store", "warn", error, advice)
    if found["notes"]:
        advice = "See disk_capacity and disk_on_other_version."
        return Check("disk store", "warn", "; ".join(found["notes"]), advice)
    kind = "a store that is kept" if found["is_kept"] else "room for a new store"
    index = format_size(found["capacity"] // INDEX_EXAMPLE_BYTES * INDEX_BYTES_PER_NODE)
    said = (
        f"{found['path']}: {kind}, {format_size(found['capacity'])} for blocks; their index takes {index} of memory if "
        f"blocks have {format_size(INDEX_EXAMPLE_BYTES)} (`undercroft size` tells for a model)"
    )
    return Check("disk store", "ok", said)


def _refused_advice(path: str, error: str) -> str:
    if "belongs to uid" in error:
        # The root of a Kubernetes volume belongs to root, for example.
        return f"undercroft does not start with it. Choose {path}/undercroft: it creates that directory."
    return "undercroft does not start with this directory."


def device(path: Path) -> Iterator[Check]:
    """The device below the directory's filesystem, if it is not a local disk of its own."""
    place = _existing(path)
    mount, kind = _mount(place)
    if kind in MEMORY_FILESYSTEMS:
        advice = "Its blocks are host memory a second time: give host_memory more instead, and a disk_path on NVMe."
        yield Check("disk device", "warn", f"{path} is in memory ({kind})", advice)
    elif kind in LAYERED_FILESYSTEMS:
        advice = "The container's end deletes the cache, and an overlay is slow: mount a local disk there."
        yield Check("disk device", "warn", f"{path} is in the container's own filesystem ({kind})", advice)
    elif kind in NETWORK_FILESYSTEMS:
        yield Check("disk device", "warn", f"{path} is on the network ({kind})", "Choose a disk_path on a local disk.")
    elif mount == "/" and path.absolute().is_relative_to("/mnt"):
        advice = f"Mount the disk first. {place} would fill the system's own disk."
        yield Check("disk device", "warn", f"{path} is on the root filesystem: no disk is mounted there", advice)


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _no_direct_io(where: str, error: OSError) -> Check:
    found = f"no O_DIRECT on {where}: {error.strerror}"
    return Check("disk path", "warn", found, "The engine uses buffered IO. Prefer ext4 or XFS on NVMe.")


def _mount(directory: Path) -> tuple[str, str]:
    """Mount point and type of the directory's filesystem: the mount with the longest matching path."""
    best, kind = "", "unknown filesystem"
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4]
        if directory.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return best, kind


def _meminfo() -> dict[str, int]:
    """The values of /proc/meminfo: sizes in bytes, and counts."""
    found = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found


def _read(path: str) -> str:
    """The content of a small file of the kernel; empty if it does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
