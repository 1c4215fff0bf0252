"""An engine with the hit threshold for its tests, and their shared checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from real_engine import Engine, Generation, prompt
from undercroft import vllm_patches

# 128-token blocks: of a prompt of 897 tokens, 896 can be hit.
WHOLE = prompt(897)
HALF = WHOLE[:448] + prompt(449, seed=5)  # 3 whole blocks of WHOLE: 384 tokens, 0.428
FIFTH = WHOLE[:179] + prompt(718, seed=6)  # 1 block: 128 tokens, 0.143


def make(model: Path, global_threshold: float = 0.0, **arguments: Any) -> Engine:
    vllm_patches.reject_requests()
    return Engine(
        model,
        {"cache_hit_threshold": global_threshold},
        connector="StandIn",
        module_path="threshold_standin",
        max_model_len=2048,
        **{"blocks": 512, "max_num_seqs": 32, **arguments},
    )


def limit(value: Any) -> dict[str, Any]:
    return {"cache_hit_threshold": value}


def rejected(result: Generation) -> bool:
    if result.finish_reason != "cache_threshold":
        return False
    assert result.kv_transfer_params is not None
    return True


def nothing_left(one: Engine) -> None:
    """No request, block or rejection remains in the scheduler or the connector."""
    one.idle_steps()
    assert one.scheduler.requests == {}
    assert not (one.scheduler.waiting or one.scheduler.deferred_waiting or one.scheduler.kv_holding_waiting)
    assert one.device_blocks_in_use() == 0
    assert one.connector.threshold.collect() == []
    processor = one.llm.llm_engine.output_processor
    assert processor.request_states == {}
    assert processor.parent_requests == {}
    assert one.reset_device_cache()
