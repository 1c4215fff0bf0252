"""A connector that brings blocks of a prefill instance, for tests beside undercroft in MultiConnector.

As NIXL does, it brings the prompt of a request with ``do_remote_prefill`` and clears the parameter. The values are
those that a request with ``do_remote_decode`` has left in ``shared_storage_path``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata


class RemoteConnector(ExampleConnector):
    """Loads in the step that computes the rest; with ``kv_transfer_params.fails`` it loads before, and fails."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leaves: set[str] = set()
        self._failing: list[str] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._leaves.add(request.request_id)
        if not params.get("do_remote_prefill"):
            return 0, False
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return tokens, bool(params.get("fails"))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        request.kv_transfer_params["do_remote_prefill"] = False
        if request.kv_transfer_params.get("fails"):
            self._failing.append(request.request_id)
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ExampleConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        # In one order with the requests that it has metadata for.
        new = [one.req_id for one in scheduler_output.scheduled_new_reqs]
        stored = [request for request in meta.requests if request.is_store]
        if not self._leaves.issuperset(new):
            meta.requests = [request for request in meta.requests if request not in stored]
        meta.failing, self._failing = self._failing, []
        return meta

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failing = set(self._get_connector_metadata().failing) if self.has_connector_metadata() else set()
        return KVConnectorTransferResults(finished_recving=failing, failed_recving=set(failing))
