"""Every field of vLLM's configurations is in the description, or has a reason not to be."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import vllm.config
from vllm.config import LoRAConfig, MultiModalConfig, SpeculativeConfig

from undercroft.identity.described_fields import TABLES
from undercroft.identity.namespace import _READS_RUN_SETTINGS, _fields, unclassified

REVIEWED = {
    # Rotary embeddings of the kinds "longrope" and "dynamic": see `_POSITION_FREE_ROPE`.
    "layers/rotary_embedding/phi3_long_rope_scaled_rope.py",
    "models/transformers/utils.py",
    # The size of a table of rotary factors, which only the kind "dynamic" draws conclusions from.
    "models/minimax_m2.py",
    "models/plamo3.py",
    "models/embedding_gemma2.py",
    # Tuned attention: `_READS_RUN_SETTINGS`.
    "models/llama4.py",
    # Sizes of buffers and workspaces.
    "layers/attention/static_sink_attention.py",
    "layers/attention/mla_attention.py",
    "layers/attention/sparse_mla_attention.py",
    "layers/rocm_paged_mxfp4_indexer.py",
    "layers/sparse_attn_indexer.py",
    "layers/quantization/modelopt_block_quant.py",
    "models/deepseek_v2.py",
    # Written into the model's configuration, or the cache's, which are described.
    "models/config.py",
    # How many tokens a picture, a video or sound may have: tokens, which are hashed.
    "models/cohere_compass.py",
    "models/deepseek_ocr.py",
    "models/deepseek_vl2.py",
    "models/gemma3_mm.py",
    "models/gemma4_mm.py",
    "models/gemma4_unified.py",
    "models/glm4_1v.py",
    "models/idefics3.py",
    "models/internvl.py",
    "models/kimi_k25.py",
    "models/kimi_vl.py",
    "models/lfm2_vl.py",
    "models/minicpmv.py",
    "models/mllama4.py",
    "models/nano_nemotron_vl.py",
    "models/ernie45_vl.py",
    "models/parakeet.py",
    "models/qwen2_5_vl.py",
    "models/qwen2_vl.py",
    "models/qwen3_vl.py",
    "models/step3_vl.py",
    "models/voxtral.py",
    "models/voxtral_realtime.py",
    # Which tokens are sampled.
    "models/diffusion_gemma.py",
    "models/gemma4_mtp.py",
}
"""Files of vLLM's models that read max_model_len or the generation config, and their purpose."""


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_field_of_vllm_has_an_answer(name):
    config = getattr(vllm.config, name)
    missing = unclassified(config, TABLES[name])
    assert not missing, (
        f"{name} has fields that nobody has judged: {missing}. Until then they go into the description. Does the KV "
        "cache of a prefix depend on them? Put them into undercroft/identity/described_fields.py, with the reason."
    )


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_field_has_one_answer(name):
    table = TABLES[name]
    answers = [*table.described, *table.elsewhere, *table.harmless]
    assert len(answers) == len(set(answers))


def test_every_configuration_that_matters_has_a_table():
    vllm_fields = TABLES["VllmConfig"]
    parts = {field.name for field in dataclasses.fields(vllm.config.VllmConfig)} - set(vllm_fields.harmless)
    tables = {
        "model_config": "ModelConfig",
        "cache_config": "CacheConfig",
        "parallel_config": "ParallelConfig",
        "load_config": "LoadConfig",
        "attention_config": "AttentionConfig",
        "mamba_config": "MambaConfig",
        "kernel_config": "KernelConfig",
        "lora_config": "LoRAConfig",
        "speculative_config": "SpeculativeConfig",
        "diffusion_config": "DiffusionConfig",
    }
    # Hashed by vLLM, as a whole; the quantization is made from the model's configuration.
    assert parts - set(tables) == {"engram_config", "additional_config", "quant_config"}
    assert set(tables.values()) | {"VllmConfig", "MultiModalConfig"} == set(TABLES)


def test_a_field_that_nobody_has_judged_is_described():
    @dataclasses.dataclass
    class NewMambaConfig:
        backend: str = "TRITON"
        fancy: int = 3

    assert _fields("MambaConfig", NewMambaConfig()) == {"fancy": 3}


def test_fields_of_the_usual_value_are_left_out_and_others_are_not():
    assert _fields("SpeculativeConfig", SpeculativeConfig(model="ngram", num_speculative_tokens=2)) == {
        "method": "ngram",
        "num_speculative_tokens": 2,
    }
    for name in ("AttentionConfig", "MultiModalConfig", "LoRAConfig", "KernelConfig", "MambaConfig"):
        assert _fields(name, getattr(vllm.config, name)()) == {}, name


def test_modules_that_adapters_change_are_described():
    """An adapter's own weights are in the block's hash, not which modules vLLM applies them to."""
    described = _fields("LoRAConfig", LoRAConfig(target_modules=["q_proj"], lora_dtype="bfloat16"))
    assert described == {"target_modules": ["q_proj"], "lora_dtype": "bfloat16"}


def test_precision_of_the_multimodal_encoder_is_described():
    """The text's KV depends on the encoder's output for a picture."""
    assert _fields("MultiModalConfig", MultiModalConfig(mm_encoder_attn_dtype="fp8")) == {
        "mm_encoder_attn_dtype": "fp8"
    }


def test_models_that_read_settings_of_the_run_are_known():
    root = Path(vllm.config.__file__).parents[1] / "model_executor"
    pattern = re.compile(r"\.max_model_len\b|try_get_generation_config")
    found = {
        path.relative_to(root).as_posix()
        for folder in ("models", "layers")
        for path in (root / folder).rglob("*.py")
        if pattern.search(path.read_text())
    }
    assert _READS_RUN_SETTINGS == ("Llama4",)
    new = found - REVIEWED
    assert not new, (
        f"{sorted(new)} read max_model_len or the generation config. If KV depends on it, name the architecture in "
        "_READS_RUN_SETTINGS (undercroft/identity/namespace.py) or the rotary embedding; then add the file here."
    )
