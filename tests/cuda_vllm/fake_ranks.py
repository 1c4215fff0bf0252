"""vLLM's worker processes over the fake CUDA: the process that they are forked from imports this module first.

Each rank has a device of its own. Ranks and stages talk through the host's memory, since the fake has no NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fake_device
from fake_cuda import Fake

if fake_device.is_loaded():
    fake_device.prepare()

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.worker.gpu_worker import Worker

import mla
from compute import is_cuda, on_cpu, queue, take_errors
from prompts import slow


class HostCommunicator(DeviceCommunicatorBase):
    """In the place of NCCL: waits for the stream, and lets gloo move what lies in the device's memory."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().synchronize()
        dist.all_reduce(on_cpu(input_), group=self.cpu_group)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        torch.cuda.current_stream().synchronize()
        mine = on_cpu(input_).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self.cpu_group)
        return torch.cat(parts, dim=dim).to(input_.device)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        whole = self.all_gather(input_, dim)
        return whole if self.rank_in_group == dst else None


class _Posted:
    """A message between stages, which the stream moves in its turn."""

    def __init__(self) -> None:
        self._moved = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        """The stream that posted it also uses the tensor."""

    def is_completed(self) -> bool:
        return bool(self._moved.query())


def _in_turn(asked: Callable[..., Any], moves: Callable[..., Any]) -> Callable[..., Any]:
    """``asked``, but of a tensor in the device's memory: ``moves`` it when the current stream comes to it, as NCCL."""

    def posted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_cuda(tensor):
            return asked(tensor, *args, **kwargs)
        own = on_cpu(tensor)
        queue(lambda: moves(own, *args, **kwargs))
        return _Posted()

    return posted


def broken(_: Any) -> list[str]:
    """The errors of a rank's work so far, and the rules of the driver that it has broken."""
    torch.cuda.synchronize()
    return take_errors() + Fake().violations()


def _start_on_the_fake(init_device: Any) -> Any:
    def started(self: Worker) -> None:
        # The process that was forked has counted the devices, which a real driver would not forgive.
        torch.cuda._is_in_bad_fork = lambda: False
        torch.cuda.init()
        self.computing = fake_device.computing()
        self.computing.__enter__()
        init_device(self)
        slow(Fake(), self.rank)

    return started


mla.install()
CudaPlatform.dist_backend = "gloo"
CudaPlatform.get_device_communicator_cls = classmethod(lambda _: f"{__name__}.{HostCommunicator.__name__}")
dist.isend = _in_turn(dist.isend, dist.send)
dist.irecv = _in_turn(dist.irecv, dist.recv)
dist.broadcast = _in_turn(dist.broadcast, dist.broadcast)
Worker.broken = broken
Worker.init_device = _start_on_the_fake(Worker.init_device)
