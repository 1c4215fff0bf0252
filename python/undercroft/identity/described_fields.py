"""Which settings of vLLM the bytes of a cached block depend on, field by field.

vLLM's ``compute_hash()`` of a configuration is not used where it would do harm: it holds the model's path, so a copied
model would be another model. It leaves out settings that change KV but not the compiled graph. Two digests do not
show which setting differs. The tables here name each field.

A field that is in no table (a newer vLLM has added it) goes into the description: such a field costs a cold start at
worst, and a test names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def _spread(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Fields:
    """The treatment of each field of one of vLLM's configuration classes."""

    described: Mapping[str, Any] = field(default_factory=dict)
    """Fields that go into the description, each with its usual value, which is left out. The usual values are fixed
    here: a later vLLM that changes a default makes a difference, and a field that it adds makes none while unused."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Fields whose effect another part of the description holds, each with the name of that part."""
    harmless: Mapping[str, str] = field(default_factory=dict)
    """Fields that do not change a block's bytes beyond rounding, or that no hit can cross, each with the reason."""


_ROUNDING = "how the work is split or which kernel computes the same formula: equal to rounding"
_MEMORY = "how much memory there is and where, not its contents"
_OUTPUT = "works on logits, tokens or answers, after the KV is written"
_INPUT = "which requests are accepted and how they become tokens; hashes are of tokens"
_START = "how the process starts and prepares itself"
_DERIVED = "vLLM derives it from other fields"
_REFUSED = "undercroft is off with any value but the usual one"
_WHERE = "where processes run and how they find each other"
_HF = "config: the model's effective configuration"
_SPECS = "groups: the specs of the layers"

MODEL = Fields(
    described={
        "quantization": None,
        "quantization_config": None,
        "model_impl": "auto",
        "disable_sliding_window": False,
        "model_class_overrides": {},
    },
    elsewhere=_spread(
        {
            "weights": "model model_weights revision",
            "weights, if the model brings code of its own": "trust_remote_code code_revision",
            "dtype": "dtype",
            "runner": "runner convert",
            _HF: "hf_config hf_text_config hf_config_path config_format hf_overrides",
            "max_model_len, where rotary factors or attention depend on it": "max_model_len spec_target_max_model_len",
            "generation_config, where the model reads it": "generation_config override_generation_config",
            "multimodal": "multimodal_config",
        }
    ),
    harmless=_spread(
        {
            _INPUT: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init allowed_local_media_path "
            "allowed_media_domains io_processor_plugin renderer_num_workers served_model_name",
            _OUTPUT: "seed return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel logits_processors "
            "pooler_config word_embeddings_untied_by_checkpoint",
            _ROUNDING: "enforce_eager disable_cascade_attn",
            _START: "hf_token enable_trace_replay allow_deprecated_quantization",
            _MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
            "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
            _DERIVED: "is_submodel_config",
            "a block's hash, to which vllm_patches.inputs adds, covers the embeddings": "enable_prompt_embeds",
        }
    ),
)

CACHE = Fields(
    described={
        "kv_cache_dtype_skip_layers": [],
        "kv_sharing_fast_prefill": False,
        "swa_bounded_replay": True,
        "use_replayssm": False,
        "use_kda_recoverssm": False,
    },
    elsewhere=_spread(
        {
            "cache_dtype": "cache_dtype",
            "layout": "kv_cache_layout",
            "hash": "prefix_caching_hash_algo prefix_match_unit hash_block_size",
            _SPECS: "block_size sliding_window mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype "
            "mamba_cache_mode mamba_page_size_padded skip_page_size_padded",
        }
    ),
    harmless=_spread(
        {
            _MEMORY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
            "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size "
            "kv_offloading_backend simple_cpu_offload_num_blocks",
            _DERIVED: "user_specified_block_size is_attention_free effective_attention_block_size "
            "cache_hit_alignment_tokens _block_size_resolved",
            _REFUSED: "enable_prefix_caching",
            "which states are kept, not their contents": "prefix_cache_retention_interval "
            "enable_mamba_shared_prefix_checkpoint",
            "how long a log of decoded tokens grows before it is folded into the state: equal to rounding": (
                "replayssm_buffer_len"
            ),
        }
    ),
)

ATTENTION = Fields(
    described={
        "minimax_m3_msa_decode_backend": "triton",
        "flash_attn_version": None,
        "use_trtllm_attention": None,
        "disable_flashinfer_q_quantization": False,
        "mla_prefill_backend": None,
        "trtllm_ragged_backend": "trtllm-gen",
        "use_prefill_query_quantization": False,
        "indexer_kv_dtype": "auto",
        "indexer_sparse_logits": False,
        "minimax_m3_indexer_cp": False,
        "hisparse_config": None,
        "use_non_causal": False,
        "sparse_mla_force_mqa": False,
    },
    elsewhere={
        "backend": "attention.backends: as resolved, not as configured",
        "backend_per_kind": "attention.backends: as resolved, not as configured",
    },
    harmless=_spread(
        {
            _ROUNDING: "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
            "tq_max_kv_splits_for_cuda_graph flex_attn_block_m flex_attn_block_n flex_attn_q_block_size "
            "flex_attn_kv_block_size indexer_tp_shard_min_rows",
            _MEMORY: "sparse_mla_prefill_workspace_factor",
        }
    ),
)

MULTIMODAL = Fields(
    described={
        "language_model_only": False,
        "mm_encoder_only": False,
        "media_io_kwargs": {},
        "mm_processor_kwargs": None,
        "mm_device_do_normalize": True,
        "mm_encoder_attn_backend": None,
        "mm_encoder_attn_dtype": None,
        "mm_encoder_tp_mode": "weights",
        "video_pruning_rate": None,
        "video_pruning_method": "evs",
        "allow_missing_mm_embeddings": False,
    },
    elsewhere={"mm_encoder_fp8_scale_path": "multimodal.fp8_scales: the file's digest"},
    harmless=_spread(
        {
            _INPUT: "limit_per_prompt interleave_mm_strings",
            _MEMORY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc "
            "mm_ipc_gpu_memory_gb",
            _START: "skip_mm_profiling mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
            "a block's hash covers the input's content by it": "mm_hasher_algorithm",
            "a block's hash covers the embeddings": "enable_mm_embeds",
        }
    ),
)

LORA = Fields(
    described={
        "lora_dtype": "auto",
        "target_modules": None,
        "default_mm_loras": None,
        "enable_tower_connector_lora": False,
        "enable_mixed_moe_lora_format": False,
        "enable_moe_shared_loras": False,
    },
    harmless=_spread(
        {
            _MEMORY: "max_lora_rank max_loras max_cpu_loras",
            _ROUNDING: "fully_sharded_loras specialize_active_lora",
            _OUTPUT: "max_lora_cls_labels",
        }
    ),
)

SPECULATIVE = Fields(
    described={
        "method": None,
        "num_speculative_tokens": None,
        "quantization": None,
        "moe_backend": None,
        "attention_backend": None,
        "kv_cache_dtype": None,
        "index_share_for_mtp_iteration": None,
        "use_heterogeneous_vocab": False,
        "parallel_drafting": False,
        "enable_adaptive_verification": False,
        "disable_eagle_block_drop": False,
    },
    elsewhere={
        **_spread(
            {
                "draft.model": "model draft_model_config revision code_revision draft_load_config",
                "model": "target_model_config",
                "parallel": "target_parallel_config draft_parallel_config",
                "hash.lookahead_tokens": "disable_lookahead_block_hashes",
                "draft.model.max_model_len, where rotary factors or attention depend on it": "max_model_len",
            }
        ),
        "draft_tensor_parallel_size": "groups: the specs of the draft's layers",
        "tensor_parallel_size": "groups: the specs of the draft's layers",
    },
    harmless=_spread(
        {
            _OUTPUT: "use_local_argmax_reduction prompt_lookup_max prompt_lookup_min "
            "num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
            "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method "
            "synthetic_acceptance_rates synthetic_acceptance_length draft_sample_method dspark_draft_topk "
            "draft_lm_head_quantization xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k",
            _ROUNDING: "enforce_eager disable_padded_drafter_batch",
        }
    ),
)

LOAD = Fields(
    elsewhere={"load_format": "load_format", "ignore_patterns": "weights", "model_loader_extra_config": "load_format"},
    harmless=_spread(
        {
            _START: "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size use_tqdm_on_load",
            _WHERE: "device pt_load_map_location",
        }
    ),
)

PARALLEL = Fields(
    elsewhere=_spread(
        {
            "parallel": "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size",
        }
    ),
    harmless=_spread(
        {
            _REFUSED: "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate "
            "_allow_auto_resolve_cp_interleave_size",
            _ROUNDING: "data_parallel_size is_moe_model enable_hc_sp enable_expert_parallel "
            "enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy "
            "all2all_backend enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
            "disable_custom_all_reduce enable_elastic_ep elastic_ep_max_dp_size",
            _WHERE: "data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_master_ip "
            "data_parallel_rpc_port dp_sync_interval data_parallel_master_port data_parallel_backend "
            "data_parallel_external_lb data_parallel_hybrid_lb max_parallel_loading_workers "
            "enable_shm_tensor_arena disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env "
            "placement_group distributed_executor_backend master_addr master_port node_rank nnodes numa_bind "
            "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds "
            "cpu_distributed_timeout_seconds _data_parallel_master_port_list _coord_store_port data_parallel_index "
            "_api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config rank",
            "worker classes of one's own: namespace_salt keeps theirs apart if they compute other KV": (
                "worker_cls worker_extension_cls"
            ),
            _DERIVED: "world_size",
        }
    ),
)

MAMBA = Fields(
    described={
        "enable_stochastic_rounding": False,
        "stochastic_rounding_philox_rounds": 0,
        "backend": "TRITON",
        "ssu_algorithm": None,
    }
)

KERNEL = Fields(
    described={"moe_backend": "auto", "linear_backend": "auto", "linear_backend_per_quant": None},
    harmless=_spread(
        {
            _ROUNDING: "ir_op_priority sparse_indexer_topk_backend monokernel",
            _START: "enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup "
            "enable_jit_warmup",
        }
    ),
)

DIFFUSION = Fields(described={"canvas_length": None, "max_denoising_steps": None})

VLLM = Fields(
    elsewhere=_spread(
        {
            "model": "model_config quant_config",
            "cache": "cache_config",
            "parallel": "parallel_config",
            "load_format": "load_config",
            "attention": "attention_config",
            "mamba": "mamba_config",
            "kernel": "kernel_config",
            "lora": "lora_config",
            "draft": "speculative_config",
            "diffusion": "diffusion_config",
            "engram: vLLM's compute_hash": "engram_config",
            "additional: vLLM's compute_hash, or the values": "additional_config",
        }
    ),
    harmless=_spread(
        {
            "which tokens share a step, and when: equal to rounding": "scheduler_config",
            _ROUNDING: "compilation_config optimization_level performance_mode",
            _WHERE: "device_config instance_id",
            _MEMORY: "offload_config",
            _OUTPUT: "aux_output_config watermark_config structured_outputs_config reasoning_config",
            _START: "observability_config logging_config profiler_config shutdown_timeout watchdog_config",
            "who else is given KV, and how": "kv_transfer_config kv_events_config",
            "a block's hash covers the input by its name; shareable.py tells which names can be trusted": (
                "ec_transfer_config ec_manager_config"
            ),
            "weights that change while vLLM runs: a reset of the cache gives it a namespace of its own": (
                "weight_transfer_config"
            ),
        }
    ),
)

TABLES: Mapping[str, Fields] = {
    "VllmConfig": VLLM,
    "ModelConfig": MODEL,
    "CacheConfig": CACHE,
    "AttentionConfig": ATTENTION,
    "MultiModalConfig": MULTIMODAL,
    "LoRAConfig": LORA,
    "SpeculativeConfig": SPECULATIVE,
    "LoadConfig": LOAD,
    "ParallelConfig": PARALLEL,
    "MambaConfig": MAMBA,
    "KernelConfig": KERNEL,
    "DiffusionConfig": DIFFUSION,
}
"""The tables, by the name of vLLM's class."""
