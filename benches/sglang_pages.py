"""Pages of SGLang's HiCache in undercroft and in SGLang's own file back end, in turn.

Each round keeps a long prompt of random pages in a back end, in calls of 128, closes it, drops the files from the page
cache, opens it again and loads the prompt, through SGLang's factory and its host pool. No GPU, no server.

Usage: PYTHONPATH="$(python tools/sglang_packages.py)" python benches/sglang_pages.py --disk DIR
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from page_cache import forget_pages
from sglang.srt.environ import envs
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE = 64
BATCH = 128
"""Pages of a call: SGLang's most."""
BACK_ENDS = ("file", "undercroft")
ASKED = (128, 1_024, 8_192)
"""Pages of a question."""


def host_pool(heads: int, layers: int) -> Any:
    """A host pool with places for a call."""
    device = memory_pool.MHATokenToKVPool(PAGE * 4, PAGE, torch.bfloat16, heads, 128, layers, "cpu", False)
    [info] = device.get_device_pool_infos()
    return MHATokenToKVPoolHost(
        info.buffer_info,
        0.0,
        0,
        PAGE,
        "page_first",
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=PAGE * 4,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=PAGE * BATCH,
    )


def chain(prompt: int, pages: int) -> list[str]:
    """The keys of a prompt's pages."""
    found, last = [], b""
    for number in range(pages):
        last = hashlib.sha256(last + b"%d %d" % (prompt, number)).digest()
        found.append(last.hex())
    return found


def opened(name: str, disk: Path, pool: Any, capacity: int) -> Any:
    """A back end."""
    extra: dict[str, Any] = {}
    if name == "file":
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.set(str(disk))
    else:
        extra = {
            "backend_name": name,
            "module_path": "undercroft.sglang_hicache",
            "class_name": "UndercroftHiCache",
            "interface_v1": 1,
            "disk_path": str(disk),
            "disk_capacity": capacity,
            "host_memory": "512MiB",
            "model_id": "bench",
        }
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "bench", extra_config=extra)
    store = StorageBackendFactory.create_backend("dynamic" if extra else name, config, pool)
    store.register_mem_pool_host(pool)
    return store


def keep(name: str, store: Any, pool: Any, before: list[str], keys: list[str], where: torch.Tensor) -> int:
    """Keep pages of a prompt, as SGLang's controller does. Returns how many are kept."""
    if name == "undercroft":
        return sum(store.batch_set_v1(keys, where, HiCacheStorageExtraInfo(prefix_keys=before)))
    pages = [pool.get_data_page(int(index)) for index in where[::PAGE]]
    return len(keys) * store.batch_set(keys, pages)


def load(name: str, store: Any, pool: Any, before: list[str], keys: list[str], where: torch.Tensor) -> int:
    """Load pages of a prompt, as SGLang's controller does. Returns how many came."""
    if name == "undercroft":
        return sum(store.batch_get_v1(keys, where, HiCacheStorageExtraInfo(prefix_keys=before)))
    found = store.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    for number, page in enumerate(found):
        if page is not None:
            pool.set_from_flat_data_page(int(where[number * PAGE]), page)
    return sum(page is not None for page in found)


def asked_us(store: Any, keys: list[str]) -> float:
    """Microseconds of a question about a prompt that was not among the last ones."""
    times, nothing = [], HiCacheStorageExtraInfo(prefix_keys=[])
    for _ in range(20):
        for other in range(8):
            store.batch_exists(chain(1 + other, 1), nothing)
        began = time.perf_counter()
        found = store.batch_exists(keys, nothing)
        times.append(time.perf_counter() - began)
        assert found == len(keys), f"{found} of {len(keys)} pages"
    return statistics.median(times) * 1e6


def measure(name: str, disk: Path, pool: Any, pages: int) -> dict[str, float]:
    """One round of a back end: pages a second, processor seconds a page, microseconds a question."""
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir(parents=True)
    page_bytes = pool.get_data_page(0).nbytes
    capacity, keys = 2 * pages * page_bytes, chain(0, pages)
    where = torch.arange(PAGE * BATCH)
    found: dict[str, float] = {"page_bytes": page_bytes}
    store = opened(name, disk, pool, capacity)
    torch.manual_seed(1)
    pool.kv_buffer.view(torch.int16).random_()
    began, cpu, kept = time.perf_counter(), time.process_time(), 0
    for at in range(0, pages, BATCH):
        kept += keep(name, store, pool, keys[:at], keys[at : at + BATCH], where)
    # Both have to have written everything.
    if name == "undercroft":
        store.close()
    forget_pages(disk)
    found["kept"] = kept
    found["keep_pages_per_s"] = kept / (time.perf_counter() - began)
    found["keep_cpu_ms_per_page"] = (time.process_time() - cpu) / kept * 1e3
    found["disk_bytes_per_page"] = sum(path.stat().st_blocks * 512 for path in disk.rglob("*")) / kept
    if name == "undercroft":
        store = opened(name, disk, pool, capacity)
    began, cpu, came = time.perf_counter(), time.process_time(), 0
    for at in range(0, pages, BATCH):
        came += load(name, store, pool, keys[:at], keys[at : at + BATCH], where)
    found["load_pages_per_s"] = came / (time.perf_counter() - began)
    found["load_cpu_ms_per_page"] = (time.process_time() - cpu) / max(1, came) * 1e3
    found["came"] = came
    for count in ASKED:
        if count <= came:
            found[f"exists_{count}_us"] = asked_us(store, keys[:count])
    if name == "undercroft":
        store.close()
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--disk", type=Path, required=True, help="an empty directory on the disk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pages", type=int, default=8_192, help="pages, a multiple of 128 (default: 8,192)")
    parser.add_argument("--heads", type=int, default=1, help="heads of 128 values, in 8 layers (default: 1)")
    args = parser.parse_args()
    pool = host_pool(args.heads, 8)
    for number in range(args.rounds):
        for name in BACK_ENDS if number % 2 == 0 else BACK_ENDS[::-1]:
            found = measure(name, args.disk / name, pool, args.pages)
            print(
                json.dumps({"round": number, "back_end": name, **{k: round(v, 3) for k, v in found.items()}}),
                flush=True,
            )
            shutil.rmtree(args.disk / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
