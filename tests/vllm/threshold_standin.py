"""A connector that holds nothing, with the hit threshold in front: the ratio counts device hits, and the
tokens that a cache would add according to a request's ``kv_transfer_params.pretend`` (``pretend_at_arrival``: until the
request is preempted). It can also answer late: ``late`` times None."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from undercroft import threshold, vllm_patches


class StandIn(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.asked: dict[str, int] = {}
        if role == KVConnectorRole.SCHEDULER:
            problem = vllm_patches.problem(vllm_patches.HIT_THRESHOLD)
            self.threshold = threshold.for_connector(config.get("cache_hit_threshold", 0.0), problem)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        asked = self.asked[request.request_id] = self.asked.get(request.request_id, 0) + 1
        if asked <= params.get("late", 0):
            return None, False
        external = params.get("pretend", 0)
        if request.num_preemptions == 0:
            external = params.get("pretend_at_arrival", external)
        if self.threshold.check(request, num_computed_tokens, external):
            return None, False
        return 0, False

    def take_threshold_rejects(self) -> list[threshold.Rejection]:
        return self.threshold.collect()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.threshold.discard(request.request_id)
        self.asked.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
