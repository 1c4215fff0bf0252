"""A device whose queued work runs when the test says so, in any order that the recorded events allow.

Stands in for `undercroft.device.streams.Streams`; its memory is host memory.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from manual_driver import ManualDriver
from undercroft._core import BlockPieces, CopyBatches, StagedCopies
from undercroft.device.memcpy import ends


class Event:
    def __init__(self) -> None:
        self.at: int | None = None


class Queue:
    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[Callable[[], None] | Event] = deque()
        """An event is a wait for it; everything else runs."""


class ManualStreams:
    copy_name = "by hand"
    model_is_slow = False
    """Whether the model's work mostly runs last."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = Queue("model")
        self.queues = [self.model]
        self.now = 0
        self.driver = ManualDriver(self)
        self.fault_rate = 0.0
        """How often queueing a batch of copies fails, half of it queued."""

    def select(self) -> None:
        pass

    def compute(self) -> Queue:
        return self.model

    def create(self, *, urgent: bool = False) -> Queue:
        self.queues.append(Queue(f"copies {len(self.queues)}"))
        return self.queues[-1]

    def record(self, stream: Queue) -> Event:
        event = Event()

        def happen() -> None:
            event.at = self.now

        stream.work.append(happen)
        return event

    def wait(self, stream: Queue, event: Event) -> None:
        stream.work.append(event)

    def happened(self, event: Event) -> bool:
        return event.at is not None

    def seconds(self, begin: Event, end: Event) -> float:
        assert begin.at is not None
        assert end.at is not None
        return (end.at - begin.at) / 1e6

    def finish(self, stream: Queue) -> None:
        while stream.work:
            self.step()

    def run(self, stream: Queue, work: Callable[[], None]) -> None:
        def inferring() -> None:
            with torch.inference_mode():
                work()

        stream.work.append(inferring)

    def copy(self, stream: Queue, pieces: BlockPieces, arena: int, *, to_arena: bool) -> None:
        arrays = ends(pieces, arena, to_arena=to_arena)
        self.copies(stream, list(zip(*(array.tolist() for array in arrays), strict=True)))

    def staged(self, stream: Queue, kernels: Queue) -> StagedCopies | None:
        batches = CopyBatches(self.driver.addresses, self.driver.handle(stream))
        return StagedCopies(batches, self.driver.handle(kernels))

    def copies(self, stream: Queue, copies: list[tuple[int, int, int]]) -> None:
        """Queue copies: destination, source and bytes of each."""
        fault = self.random.random() < self.fault_rate
        for destination, source, size in copies[: len(copies) // 2] if fault else copies:
            half = size // 2
            stream.work.append(lambda d=destination, s=source, n=half: ctypes.memmove(d, s, n))
            stream.work.append(lambda d=destination + half, s=source + half, n=size - half: ctypes.memmove(d, s, n))
        if fault:
            raise RuntimeError("injected: the driver refuses")

    def kernel(self, stream: Queue, moves: list[tuple[int, int, int]]) -> None:
        """Queue a kernel that moves bytes: destination, source and bytes of each run."""

        def move() -> None:
            for one in moves:
                ctypes.memmove(*one)

        stream.work.append(move)

    def buffer(self, stream: Queue, size: int) -> torch.Tensor:
        return torch.full((size,), 0xEE, dtype=torch.uint8)

    def step(self) -> bool:
        """Run one piece of work, from any stream that may go on; False if there is none."""
        for queue in self.queues:
            while queue.work and isinstance(queue.work[0], Event) and queue.work[0].at is not None:
                queue.work.popleft()
        ready = [queue for queue in self.queues if queue.work and not isinstance(queue.work[0], Event)]
        if not ready:
            stuck = [queue.name for queue in self.queues if queue.work]
            assert not stuck, f"{stuck} wait for events that never happen"
            return False
        if self.model_is_slow and len(ready) > 1 and self.random.random() < 0.9:
            ready = [queue for queue in ready if queue is not self.model]
        self.now += 1
        work: Any = self.random.choice(ready).work.popleft()
        work()
        return True

    def settle(self) -> None:
        while self.step():
            pass


class AtOnceExecutor:
    """Runs each function at once, in the caller's thread."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        function(*args)
        return self

    def add_done_callback(self, function: Callable[..., Any]) -> None:
        pass

    def result(self) -> None:
        pass


class LaterExecutor:
    """Runs the submitted functions when it is told to, or when a caller waits for a result."""

    def __init__(self) -> None:
        self.pending: deque[Callable[[], Any]] = deque()

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        self.pending.append(lambda: function(*args))
        return self

    def add_done_callback(self, function: Callable[..., Any]) -> None:
        pass

    def result(self) -> None:
        while self.pending:
            self.run_one()

    def run_one(self) -> None:
        if self.pending:
            self.pending.popleft()()


class RefusingExecutor(LaterExecutor):
    """While ``refuses`` is set it queues a function and then raises, as ThreadPoolExecutor does without a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        super().submit(function, *args)
        if self.refuses:
            raise RuntimeError("can't start new thread")
        return self
