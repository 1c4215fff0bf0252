"""The two halves of a lane's staging buffer take turns: one is copied while a kernel works on the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from manual_streams import Event, ManualStreams, Queue
from test_device_cuda import copy_of, make
from undercroft._core import BlockPieces
from undercroft.device.api import Job


class Preferring(ManualStreams):
    """Runs the work of one stream as soon as it may, and notes the order of kernels and batches of copies."""

    def __init__(self, first: int) -> None:
        super().__init__(0)
        self.first = first
        self.order: list[str] = []

    def run(self, stream: Queue, work: Callable[[], None]) -> None:
        super().run(stream, lambda: (self.order.append("kernel"), work()))

    def copy(self, stream: Queue, pieces: BlockPieces, arena: int, *, to_arena: bool) -> None:
        stream.work.append(lambda: self.order.append("copies"))
        super().copy(stream, pieces, arena, to_arena=to_arena)

    def step(self) -> bool:
        first = self.queues[self.first]
        while first.work and (not isinstance(first.work[0], Event) or first.work[0].at is not None):
            work = first.work.popleft()
            if not isinstance(work, Event):
                self.now += 1
                work()
                return True
        return super().step()


@pytest.mark.parametrize(
    ("to_arena", "preferred", "expected"),
    [
        # The third kernel waits until its half has been copied.
        (True, 2, ["kernel", "kernel", "copies"]),
        # The third copies wait until their half has been scattered.
        (False, 3, ["copies", "copies", "kernel"]),
    ],
    ids=["save", "load"],
)
def test_one_half_is_copied_while_a_kernel_works_on_the_other(
    to_arena: bool, preferred: int, expected: list[str]
) -> None:
    streams = Preferring(preferred)
    copier, *_ = make(streams, strategy="gather", page=1024, shards=4)
    copier.submit(to_arena, [Job(1, [copy_of([1, 2, 3, 4, 5, 6], [4096 * slot for slot in range(6)])])])
    streams.settle()
    assert Counter(streams.order) == {"kernel": 4, "copies": 3}
    # The first kernel uploads the numbers of the rows, at any time before the others.
    streams.order.remove("kernel")
    assert streams.order[:3] == expected
    assert [ended.ok for ended in copier.poll()] == [True]
