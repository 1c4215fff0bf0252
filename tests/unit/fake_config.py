"""vLLM configurations: real KV cache specs, plain namespaces for the rest."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    RSWASpec,
    SlidingWindowSpec,
)

BLOCK = 16


def attention(**changes):
    fields = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**fields, **changes})


def sliding(**changes):
    fields = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, "sliding_window": 64}
    return SlidingWindowSpec(**{**fields, **changes})


def unknown():
    """A group of a kind that the connector knows nothing of."""
    return RSWASpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, rswa_window=32)


def kv_cache_config(specs=None, layers=2, **changes):
    specs = specs or [attention()]
    groups = [
        KVCacheGroupSpec([f"layers.{layer * len(specs) + index}" for layer in range(layers)], spec)
        for index, spec in enumerate(specs)
    ]
    page = specs[0].page_size_bytes
    tensors = [KVCacheTensor(layers * page * 8, group.layer_names, page * 8, page) for group in groups]
    fields = {
        "num_blocks": 8,
        "kv_cache_tensors": tensors,
        "kv_cache_groups": groups,
        "kv_cache_layout": "LBHNC",
        "hash_block_size": BLOCK,
        "cache_hit_alignment_tokens": BLOCK,
    }
    return KVCacheConfig(**{**fields, **changes})


class HfConfig:
    def __init__(self, **values):
        self._commit_hash = None
        self.architectures = values.get("architectures")
        self.values = {"hidden_size": 256, "rope_theta": 10000.0, "_name_or_path": "/somewhere", **values}

    def to_dict(self):
        return self.values


def vllm_config(model="org/model", extra=None, max_model_len=4096, **parallel):
    sizes = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    sizes.update(parallel)
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="UndercroftConnector", kv_role="kv_both", kv_connector_extra_config=extra or {}
        ),
        model_config=SimpleNamespace(
            model=model,
            model_weights="",
            revision=None,
            code_revision=None,
            dtype=torch.bfloat16,
            hf_config=HfConfig(),
            quantization=None,
            quantization_config=None,
            model_impl="auto",
            runner_type="generate",
            convert_type="none",
            disable_sliding_window=False,
            multimodal_config=None,
            max_model_len=max_model_len,
            get_total_num_kv_heads=lambda: 2 * sizes["tensor_parallel_size"],
        ),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        lora_config=None,
        kernel_config=None,
        aux_output_config=None,
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256",
            block_size=BLOCK,
            enable_prefix_caching=True,
            kv_cache_dtype_skip_layers=[],
        ),
        parallel_config=SimpleNamespace(
            **sizes, world_size=sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"], rank=0
        ),
    )
