"""Chooses the copier for the device of the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undercroft._core import Arena
from undercroft.device.api import GATHER_BELOW, DeviceCopier
from undercroft.device.cpu import CpuCopier
from undercroft.device.layout import DeviceLayout

if TYPE_CHECKING:
    import torch

    from undercroft.device.pinning import ArenaPinner


def make_copier(
    layout: DeviceLayout,
    arena: Arena,
    pinner: ArenaPinner | None = None,
    gather_below: int = GATHER_BELOW,
) -> DeviceCopier:
    """The copier for the device that holds the KV cache. ``pinner``: the result of `pin_arena` for this device.
    ``gather_below``: on CUDA, smaller pages are gathered on the device (bytes).

    Raises ValueError if there is no copier for this kind of device, RuntimeError if the device's driver lacks a needed
    function.
    """
    if layout.device.type == "cpu":
        return CpuCopier(layout, arena)
    if layout.device.type == "cuda":
        return _cuda_copier(layout, arena, pinner, gather_below)
    raise ValueError(f"no copier for a KV cache on {layout.device}; CUDA devices and vLLM's CPU platform are supported")


def uses_pinned(device: torch.device) -> bool:
    """Whether the device copies faster from and to pinned memory."""
    return bool(device.type == "cuda")


def pin_arena(device: torch.device, arena: Arena) -> ArenaPinner | None:
    """Start to pin the arena for a device that copies faster from pinned memory; None for any other device."""
    if not uses_pinned(device):
        return None
    from undercroft.device.cuda_streams import pin

    return pin(device, arena)


def _cuda_copier(layout: DeviceLayout, arena: Arena, pinner: ArenaPinner | None, gather_below: int) -> DeviceCopier:
    from undercroft.device.cuda import CudaCopier
    from undercroft.device.cuda_streams import CudaStreams
    from undercroft.device.lane import Lanes, borrow, give_back

    lanes = borrow(layout.device, lambda: Lanes.make(CudaStreams(layout.device)))
    return CudaCopier(
        layout,
        arena,
        lanes,
        pinner,
        gather_below=gather_below,
        on_close=lambda: give_back(layout.device, lanes),
    )
