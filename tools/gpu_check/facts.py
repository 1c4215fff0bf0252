"""Properties of this machine that matter for copies."""

from __future__ import annotations

import platform
import resource
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from undercroft.device import driver


def facts(device: torch.device) -> dict[str, Any]:
    """Plain values by name."""
    found: dict[str, Any] = {
        "undercroft": _version("undercroft"),
        "torch": torch.__version__,
        "device": "cpu",
        "kernel": platform.release() + (" (WSL2)" if driver.is_wsl() else ""),
        "NUMA nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "huge pages of shared memory": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "limit on locked memory": _limit(),
    }
    if device.type == "cuda":
        from undercroft.device.memcpy import batched_copy

        found["device"] = torch.cuda.get_device_name(device)
        found["devices"] = torch.cuda.device_count()
        found["batches by"] = batched_copy().name
        found["link"] = _link(device)
    return found


def _link(device: torch.device) -> str:
    """Driver and PCIe link, as nvidia-smi tells them."""
    if shutil.which("nvidia-smi") is None:
        return "not known: there is no nvidia-smi"
    query = "driver_version,pcie.link.gen.max,pcie.link.width.current"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={device.index or 0}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return ran.stdout.strip() or ran.stderr.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def _limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return "not known"
