"""SGLang's own host pools on the CPU, small, and pages for them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from undercroft.sglang_hicache import UndercroftHiCache

PAGE = 16
"""Tokens of a page."""
PAGES = 64
"""Pages of a host pool."""
LAYERS = 2


def _host(pages: int) -> dict[str, Any]:
    """Arguments of a host pool of so many pages."""
    return {
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": PAGE * 4,
        "start_layer": 0,
        "end_layer": LAYERS,
        "host_token_capacity": PAGE * pages,
    }


def mha(layout: str = "page_first", heads: int = 2, dtype: torch.dtype = torch.bfloat16, pages: int = PAGES) -> Any:
    """A host pool of keys and values."""
    device = memory_pool.MHATokenToKVPool(PAGE * 4, PAGE, dtype, heads, 32, LAYERS, "cpu", False)
    [info] = device.get_device_pool_infos()
    return MHATokenToKVPoolHost(info.buffer_info, 0.0, 0, PAGE, layout, **_host(pages))


def mla(layout: str = "page_first") -> Any:
    """A host pool of latent attention."""
    device = memory_pool.MLATokenToKVPool(PAGE * 4, PAGE, torch.bfloat16, 48, 16, LAYERS, "cpu", False)
    [info] = device.get_device_pool_infos()
    return MLATokenToKVPoolHost(info.buffer_info, 0.0, 0, PAGE, layout, target_layer_num=LAYERS, **_host(PAGES))


def mamba(layout: str = "page_first") -> Any:
    """A host pool of states, a state a page."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 4, 2, 8, 8), conv=(torch.zeros(LAYERS, 4, 24, 3, dtype=torch.bfloat16),)
    )
    return MambaPoolHost(info, 16.0, 0, device_capacity=4, pin_memory=False, layout=layout)


def whole_pages(layout: str = "page_first") -> Any:
    """A host pool that gives and takes whole pages only."""
    pool = mha(layout)
    pool.get_page_buffer_meta = no_addresses
    return pool


def no_addresses(_: Any) -> Any:
    """The answer of such a pool."""
    raise NotImplementedError("whole pages only")


LAYOUTS = ("page_first", "page_first_direct", "layer_first")
POOLS: dict[str, Any] = {
    **{f"mha {layout}": lambda layout=layout: mha(layout) for layout in LAYOUTS},
    **{f"mla {layout}": lambda layout=layout: mla(layout) for layout in LAYOUTS},
    "whole pages": whole_pages,
}


def keys(prompt: str, count: int) -> list[str]:
    """The keys of a prompt's pages: hashes of everything up to the end of each."""
    found, last = [], b""
    for number in range(count):
        last = hashlib.sha256(last + f"{prompt} {number}".encode()).digest()
        found.append(last.hex())
    return found


def page_hashes(tokens: Sequence[int], prior: bytes | None, page_size: int) -> list[str]:
    """The hash of each whole page, and of everything before it."""
    found, last = [], prior or b""
    for begin in range(0, len(tokens) - page_size + 1, page_size):
        last = hashlib.sha256(last + np.asarray(tokens[begin : begin + page_size], "<u4").tobytes()).digest()
        found.append(last.hex())
    return found


def content(key: str, like: torch.Tensor) -> torch.Tensor:
    """The bytes that belong to a key, of a page's size."""
    numbers = np.random.default_rng(list(bytes.fromhex(key)))
    values = numbers.integers(0, 256, like.numel() * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(values).view(like.dtype)


def indices(pool: Any, places: Sequence[int]) -> torch.Tensor:
    """The host indices of pages at these places."""
    return torch.cat([torch.arange(place * pool.page_size, (place + 1) * pool.page_size) for place in places])


def fill(pool: Any, places: Sequence[int], of: Sequence[str]) -> torch.Tensor:
    """Write the pages of keys into places, and return their indices."""
    for place, key in zip(places, of, strict=True):
        like = pool.get_data_page(place * pool.page_size, flat=True)
        pool.set_from_flat_data_page(place * pool.page_size, content(key, like))
    return indices(pool, places)


def wrong(pool: Any, places: Sequence[int], of: Sequence[str], got: Sequence[bool] | None = None) -> list[int]:
    """The places that do not hold the pages of keys. ``got``: whether a page is there (default: all are)."""
    found = []
    for place, key, ok in zip(places, of, got or [True] * len(of), strict=True):
        page = pool.get_data_page(place * pool.page_size, flat=True).contiguous()
        if ok and not torch.equal(page.view(torch.uint8), content(key, page).view(torch.uint8)):
            found.append(place)
    return found


def wipe(pool: Any, places: Sequence[int]) -> torch.Tensor:
    """Zero pages, and return their indices."""
    for place in places:
        like = pool.get_data_page(place * pool.page_size, flat=True)
        pool.set_from_flat_data_page(place * pool.page_size, torch.zeros_like(like))
    return indices(pool, places)


def after(prefix: Sequence[str] = ()) -> HiCacheStorageExtraInfo:
    """What SGLang passes with keys that come after ``prefix``."""
    return HiCacheStorageExtraInfo(prefix_keys=list(prefix))


def storage_config(disk: Any, model: str = "tiny", **changed: Any) -> HiCacheStorageConfig:
    """SGLang's configuration of a back end. ``changed``: its fields, or options of the back end."""
    extra = {
        "backend_name": "undercroft",
        "module_path": "undercroft.sglang_hicache",
        "class_name": "UndercroftHiCache",
        "interface_v1": 1,
        "host_memory": "16MiB",
        "disk_path": str(disk),
        "disk_capacity": "256MiB",
        "model_id": model,
    }
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": model,
    }
    if "server" in changed:
        del extra["host_memory"], extra["disk_path"], extra["disk_capacity"]
    for name, value in changed.items():
        (fields if name in fields else extra)[name] = value
    return HiCacheStorageConfig(**fields, extra_config=extra)


def opened(disk: Any, pool: Any, **changed: Any) -> UndercroftHiCache:
    """A back end for a pool."""
    store = UndercroftHiCache(storage_config(disk, **changed), {})
    store.register_mem_pool_host(pool)
    return store
