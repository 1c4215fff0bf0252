"""The results of a worker's jobs, and its counters, until vLLM asks for them."""

from __future__ import annotations

from collections import defaultdict

from undercroft.compat import KVConnectorTransferResults
from undercroft.connector.metadata import TransferJob, UndercroftWorkerMetadata


class Outcomes:
    """Every load ends in one report of its request, every save in one acknowledgement."""

    def __init__(self) -> None:
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._answer = UndercroftWorkerMetadata()
        self._counters: defaultdict[str, float] = defaultdict(float)

    @property
    def is_anything(self) -> bool:
        """Whether a load or save has ended, or anything was counted, that was not taken yet."""
        return bool(self._received or self._answer.saves_ended or self._counters)

    def copied(self, to_arena: bool, size: int, seconds: float) -> None:
        """Count the copies of a job that has run."""
        direction = "save" if to_arena else "load"
        self._counters[f"{direction}_bytes"] += size
        self._counters[f"{direction}_seconds"] += seconds

    def registered(self, size: int) -> None:
        """Count bytes of the arena that the device has registered."""
        if size:
            self._counters["registered_bytes"] += size

    def end(self, job: TransferJob, to_arena: bool, *, ok: bool) -> None:
        """Report a job that has ended."""
        if not to_arena:
            self.end_load(job.request_id, ok=ok)
            return
        self._counters["saves_done"] += 1
        self._answer.saves_ended[job.transfer_id] = self._answer.saves_ended.get(job.transfer_id, 0) + 1
        if not ok:
            self._answer.saves_failed.add(job.transfer_id)

    def end_load(self, request_id: str, *, ok: bool) -> None:
        """Report the end of a request's load."""
        self._counters["loads_done"] += 1
        self._received.add(request_id)
        if not ok:
            self._failed.add(request_id)

    def take_loads(self) -> KVConnectorTransferResults:
        """Requests whose loads have ended since the last call, and the requests among them whose loads failed."""
        results = KVConnectorTransferResults(finished_recving=self._received, failed_recving=self._failed)
        self._received, self._failed = set(), set()
        return results

    def take_saves(self) -> UndercroftWorkerMetadata | None:
        """The saves that have ended since the last call; None if there are none."""
        if not self._answer.saves_ended:
            return None
        answer, self._answer = self._answer, UndercroftWorkerMetadata()
        return answer

    def take_counters(self) -> dict[str, float] | None:
        """Counters since the last call; None if nothing happened."""
        if not self._counters:
            return None
        counters, self._counters = dict(self._counters), defaultdict(float)
        return counters
