"""The two halves of a lane's staging buffer take turns: one is copied while a kernel works on the other."""

from __future__ import annotations

from collections import Counter

import pytest

from manual_streams import Event, ManualStreams, Queue
from test_device_cuda import copy_of, make
from undercroft.device.api import Job


class Preferring(ManualStreams):
    """Runs the work of one stream as soon as it may, and notes the order of kernels and batches of copies."""

    def __init__(self, first: int) -> None:
        super().__init__(0)
        self.first = first
        self.order: list[str] = []

    def kernel(self, stream: Queue, moves: list[tuple[int, int, int]]) -> None:
        super().kernel(stream, moves)
        stream.work.append(lambda: self.order.append("kernel"))

    def copies(self, stream: Queue, copies: list[tuple[int, int, int]]) -> None:
        super().copies(stream, copies)
        stream.work.append(lambda: self.order.append("copies"))

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
    assert Counter(streams.order) == {"kernel": 3, "copies": 3}
    assert streams.order[:3] == expected
    assert [ended.ok for ended in copier.poll()] == [True]
