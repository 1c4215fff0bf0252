"""SGLang's host pools as memory of blocks: a page is a block, in as many parts as the pool's layout has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from undercroft.embed.memory import merged

if TYPE_CHECKING:
    import torch

_TRAILING = ("mamba", "swa")
"""Pools of which a prefix needs the last pages only, by their names or the ends of these."""
_STATE = "_state"


class Pool:
    """A host pool (``HostKVCache`` in ``sglang/srt/mem_cache/pool_host/base.py``) of one page size and layout."""

    def __init__(self, name: str, host_pool: Any) -> None:
        """Raises ValueError or NotImplementedError for a pool whose pages cannot be had."""
        self.name = str(name)
        self.host_pool = host_pool
        self.page_tokens = int(getattr(host_pool, "page_size", 1) or 1)
        self.is_trailing = self.name.endswith((*_TRAILING, _STATE))
        try:
            addresses, sizes = host_pool.get_page_buffer_meta(_indices(self.page_tokens))
            self.parts = tuple(map(int, sizes[: len(addresses)]))
            self.is_direct = _all_in(self.regions(), addresses, self.parts)
        except (NotImplementedError, AttributeError, ValueError, TypeError):
            self.is_direct = False
        if not self.is_direct:
            # Some pools and layouts give whole pages only.
            page = host_pool.get_data_page(0, flat=True)
            self.parts = (page.numel() * page.element_size(),)
        if not sum(self.parts):
            raise ValueError(f"the pages of SGLang's pool {self.name} have no bytes")

    @property
    def is_same_on_ranks(self) -> bool:
        """Whether the pages are the same on all ranks of a model with latent attention. SGLang saves all its pools but
        states on one rank (``HybridCacheController.should_backup``). Keys and values by heads differ all the same."""
        return self.name != "mamba" and not type(self.host_pool).__name__.startswith("MHA")

    def description(self) -> dict[str, Any]:
        """Everything of the pool on which the bytes of a page depend."""
        pool = self.host_pool
        names = (
            "layout",
            "start_layer",
            "end_layer",
            "layer_num",
            "head_num",
            "head_dim",
            "head_group_num",
            "storage_format_tag",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "num_mamba_layers",
            "temporal_state_shape",
            "conv_state_shapes",
            "temporal_dtype",
            "conv_dtype",
            "dtype",
        )
        return {
            "name": self.name,
            "class": type(pool).__name__,
            "page_tokens": self.page_tokens,
            "parts": list(self.parts),
            "direct": self.is_direct,
            **{name: repr(value) for name in names if (value := getattr(pool, name, None)) is not None},
        }

    def regions(self) -> list[tuple[int, int]]:
        """Address and size of the pool's memory."""
        buffers = getattr(self.host_pool, "get_hybrid_pool_buffer", None)
        found = list(buffers()) if buffers is not None else []
        own = getattr(self.host_pool, "kv_buffer", None)
        found += own if isinstance(own, (list, tuple)) else [own]
        spans = {(one.data_ptr(), one.nbytes) for one in found if one is not None and one.nbytes}
        # K and V may be views of one tensor.
        return merged(spans)

    def addresses(self, host_indices: torch.Tensor) -> npt.NDArray[np.int64]:
        """The address of each part of each page, of shape (pages, parts)."""
        found, _ = self.host_pool.get_page_buffer_meta(host_indices)
        return np.asarray(found, dtype=np.int64).reshape(-1, len(self.parts))

    def pages(self, host_indices: torch.Tensor) -> list[int]:
        """The first index of each page."""
        return [int(index) for index in host_indices[:: self.page_tokens]]

    def take(self, page: int, row: npt.NDArray[np.uint8]) -> None:
        """Copy a page into ``row``. ``page``: its first index."""
        import torch

        flat = self.host_pool.get_data_page(page, flat=True)
        row[:] = flat.contiguous().view(torch.uint8).numpy()

    def put(self, page: int, row: npt.NDArray[np.uint8]) -> None:
        """Copy ``row`` into a page. ``page``: its first index."""
        import torch

        flat = self.host_pool.get_dummy_flat_data_page()
        flat.view(torch.uint8).numpy()[:] = row
        self.host_pool.set_from_flat_data_page(page, flat)


def _indices(count: int) -> torch.Tensor:
    import torch

    return torch.arange(count)


def _all_in(regions: list[tuple[int, int]], addresses: list[int], sizes: tuple[int, ...]) -> bool:
    return all(
        any(begin <= address and address + size <= begin + length for begin, length in regions)
        for address, size in zip(addresses, sizes, strict=True)
    )
