"""The operations of a device that the CUDA copier uses: streams of work, events between them, and copies of bytes.

All ordering uses these operations. So tests can use another device, which runs queued work in any order that the events
allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from undercroft._core import BlockPieces, StagedCopies


class Streams(Protocol):
    """A device's streams and events, both opaque to the caller.

    Work on one stream runs in the order in which it was queued; between streams only `wait` orders anything. Every
    method may raise once the device has failed.
    """

    copy_name: str
    """Name of the function that queues batches of copies, for people."""

    def select(self) -> None:
        """Select this device for the calling thread. A thread that selects none uses the first device."""

    def compute(self) -> Any:
        """The stream of the calling thread's own work, which is the model's."""

    def create(self, *, urgent: bool = False) -> Any:
        """A new stream. ``urgent``: its kernels come before those of the model that wait at the same time."""

    def record(self, stream: Any) -> Any:
        """An event that happens when all work queued on ``stream`` so far has run."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let all work queued on ``stream`` from now on run after ``event``."""

    def happened(self, event: Any) -> bool:
        """Whether the event has happened. Does not wait."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two events that have happened."""

    def finish(self, stream: Any) -> None:
        """Wait until everything queued on ``stream`` has run."""

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """Queue the operations of ``work`` on PyTorch tensors of the device."""

    def copy(self, stream: Any, pieces: BlockPieces, arena: int, *, to_arena: bool) -> None:
        """Queue copies between the device and the arena, whose address is ``arena``.

        One thread at a time calls it for a stream. It may wait until earlier copies of the stream have run.
        """

    def staged(self, stream: Any, kernels: Any) -> StagedCopies | None:
        """A queue of copies on ``stream`` that pass a staging buffer, with kernels on the stream ``kernels``.

        Its copies count as those of `copy`. None if this device has no such queue.
        """

    def buffer(self, stream: Any, size: int) -> torch.Tensor:
        """``size`` bytes (uint8) of device memory for the use of ``stream`` alone."""
