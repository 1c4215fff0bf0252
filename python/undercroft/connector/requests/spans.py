"""Spans of OpenTelemetry for reads, loads and saves, in vLLM's trace of their request.

They exist where vLLM traces (``--otlp-traces-endpoint``) and the request has trace headers. Without, nothing of this
file runs.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from undercroft import compat
from undercroft.connector.metadata import UndercroftWorkerMetadata

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from undercroft.connector.metadata import TransferJob, UndercroftMetadata

PROMOTION, LOAD, SAVE = "undercroft.promotion", "undercroft.load", "undercroft.save"
_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""vLLM sets this variable in its processes if tracing is on."""


def is_traced() -> bool:
    """Whether vLLM traces requests."""
    return bool(os.environ.get(_ENDPOINT)) and compat.may_trace()


@dataclass(slots=True)
class _Transfer:
    headers: Any
    blocks: int
    since: float
    """Seconds since 1970."""
    ranks_left: int

    def ended(self, span: str, *, ok: bool) -> None:
        compat.trace(span, self.since, self.headers, {f"{span}.blocks": self.blocks, f"{span}.ok": ok})


class Spans:
    """The spans of one vLLM's requests."""

    def __init__(self, world_size: int) -> None:
        """``world_size``: the ranks that copy each save."""
        self._world_size = world_size
        self._headers: dict[str, Any] = {}
        self._finished: list[str] = []
        """Requests whose last saves begin in the next step."""
        self._reads: dict[str, float] = {}
        """By request: since when the scheduler has waited for reads."""
        self._loads: dict[str, _Transfer] = {}
        self._saves: dict[int, _Transfer] = {}

    def arrived(self, request: Request) -> None:
        """A request has arrived."""
        if headers := getattr(request, "trace_headers", None):
            self._headers[request.request_id] = headers

    def asked(self, request_id: str, *, is_reading: bool) -> None:
        """The scheduler has asked about a request. ``is_reading``: whether it waits for reads into host memory."""
        if (headers := self._headers.get(request_id)) is None:
            return
        if is_reading:
            self._reads.setdefault(request_id, time.time())
        elif (since := self._reads.pop(request_id, None)) is not None:
            compat.trace(PROMOTION, since, headers, {})

    def scheduled(self, metadata: UndercroftMetadata) -> None:
        """The transfers of a step are on their way to the workers."""
        self._loads |= {job.request_id: found for job, found in self._begun(metadata.loads, 1)}
        self._saves |= {job.transfer_id: found for job, found in self._begun(metadata.saves, self._world_size)}
        while self._finished:
            self._headers.pop(self._finished.pop(), None)

    def _begun(self, jobs: Iterable[TransferJob], ranks: int) -> list[tuple[TransferJob, _Transfer]]:
        now = time.time()
        return [
            (job, _Transfer(headers, sum(len(copy.block_ids) for copy in job.groups), now, ranks))
            for job in jobs
            if (headers := self._headers.get(job.request_id)) is not None
        ]

    def reported(self, output: KVConnectorOutput) -> None:
        """The workers have reported the transfers that have ended."""
        failed = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            if (load := self._loads.pop(request_id, None)) is not None:
                load.ended(LOAD, ok=request_id not in failed)
        answer = output.kv_connector_worker_meta
        if not self._saves or not isinstance(answer, UndercroftWorkerMetadata):
            return
        for transfer_id, ranks in answer.saves_ended.items():
            if (save := self._saves.get(transfer_id)) is not None:
                save.ranks_left -= ranks
                if save.ranks_left <= 0:
                    del self._saves[transfer_id]
                    save.ended(SAVE, ok=transfer_id not in answer.saves_failed)

    def finished(self, request_id: str) -> None:
        """A request has ended. Its loads and saves under way go on."""
        self._reads.pop(request_id, None)
        if request_id in self._headers:
            self._finished.append(request_id)
