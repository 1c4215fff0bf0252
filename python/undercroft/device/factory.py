"""Chooses the copier for the device that the KV cache is on."""

from __future__ import annotations

from undercroft._core import Arena
from undercroft.device.api import DeviceCopier
from undercroft.device.cpu import CpuCopier
from undercroft.device.layout import DeviceLayout


def make_copier(layout: DeviceLayout, arena: Arena, rank: int) -> DeviceCopier:
    """The copier for the device that the KV cache is on.

    Raises ValueError if there is none for this kind of device, RuntimeError if the device's driver lacks what it needs.
    """
    if layout.device.type == "cpu":
        return CpuCopier(layout, arena, rank)
    if layout.device.type == "cuda":
        from undercroft.device.cuda import CudaCopier
        from undercroft.device.cuda_streams import CudaStreams, pin

        streams = CudaStreams(layout.device)
        return CudaCopier(layout, arena, rank, streams, pin(layout.device, arena))
    raise ValueError(f"no copier for a KV cache on {layout.device}; CUDA devices and vLLM's CPU platform are supported")
