"""A worker whose copies run when the test says so."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from manual_streams import ManualStreams, RefusingExecutor
from test_worker import ARENA, Rank
from undercroft._core import Arena
from undercroft.connector.metadata import UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.connector.worker import worker
from undercroft.device.cuda import CudaCopier
from undercroft.device.lane import Lanes


class SlowRank(Rank):
    """Its device is ``streams``, and its lanes' threads run at the call of `queue`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
        super().__init__(host)
        self.streams = ManualStreams(0)
        self.threads: defaultdict[str, RefusingExecutor] = defaultdict(RefusingExecutor)
        self.free = [Lanes.make(self.streams, thread=lambda name: self.threads[name])]
        monkeypatch.setattr(worker, "make_copier", self._copier)
        self.worker.register_kv_caches(self.caches)

    def _copier(self, layout: Any, arena: Any, pinner: Any, gather_below: int) -> CudaCopier:
        assert self.free, "a second copier would need device memory of its own"
        lanes = self.free.pop()
        return CudaCopier(layout, arena, lanes, None, on_close=lambda: self.free.append(lanes))

    def queue(self) -> None:
        """Let the lanes' threads queue all copies on the device, which runs nothing."""
        for thread in self.threads.values():
            thread.result()

    def settle(self) -> None:
        """Let all copies run."""
        self.queue()
        self.streams.settle()

    def hooks(self, metadata: UndercroftMetadata) -> tuple[set[str], set[str], UndercroftWorkerMetadata | None]:
        """The hooks of one step, after which copies may still run."""
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        return self.results()


class Attachments:
    """Hands out one arena by each socket, and keeps the attachments of each session."""

    def __init__(self) -> None:
        self.arenas: dict[str, Arena] = {}
        self.made: dict[tuple[str, int], Attachment] = {}
        self.now = 100.0

    def attach(self, socket: str, session: int) -> Any:
        arena = self.arenas.setdefault(socket, Arena.create(ARENA))
        made = self.made[(socket, session)] = Attachment(arena, 10 + list(self.arenas).index(socket))
        return made


class Attachment:
    """An attached arena that tells whether the worker has let it go, and whose engine ends when the test says so."""

    def __init__(self, arena: Arena, arena_id: int = 0) -> None:
        self.arena = arena
        self.arena_id = arena_id
        self.is_served = True
        self.gone = 0

    def let_go(self) -> None:
        self.gone += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arena, name)
