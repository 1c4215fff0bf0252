from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    UniformTypeKVCacheSpecs,
)

from fake_config import HfConfig, attention, kv_cache_config, sliding, vllm_config
from undercroft import compat
from undercroft.connector.groups import GroupRegistration, Groups, why_unsupported
from undercroft.identity import schemes
from undercroft.identity.namespace import Naming, describe, random_seed
from undercroft.identity.weights import Digests


@pytest.fixture(autouse=True)
def no_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def test_same_settings_same_text():
    assert describe(vllm_config(), kv_cache_config()) == describe(vllm_config(), kv_cache_config())


def test_canonical_form():
    text = describe(vllm_config(), kv_cache_config())
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert json.loads(text)["format"] == 2


def test_same_text_in_another_process():
    script = (
        "from fake_config import *; from undercroft.identity.namespace import describe;"
        "print(describe(vllm_config(), kv_cache_config([attention(), sliding()])), end='')"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "python"), *sys.path])
    output = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True
    )
    assert output.stdout.decode().splitlines()[-1] == describe(vllm_config(), kv_cache_config([attention(), sliding()]))


def changed(path, value):
    config = vllm_config()
    target = config
    *parents, name = path.split(".")
    for parent in parents:
        target = getattr(target, parent)
    assert getattr(target, name) != value
    setattr(target, name, value)
    return config


DRAFT = SimpleNamespace(method="eagle", draft_model_config=vllm_config("org/draft").model_config)


def llama4(max_model_len=8192, **override):
    """A model whose attention vLLM tunes by the length and the generation config."""
    config = vllm_config(max_model_len=max_model_len)
    config.model_config.hf_config = HfConfig(architectures=["Llama4ForConditionalGeneration"])
    config.model_config.override_generation_config = override
    return config


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.model", "org/other"),
        ("model_config.revision", "abc"),
        ("model_config.code_revision", "abc"),
        ("model_config.dtype", torch.float16),
        ("model_config.hf_config", HfConfig(rope_theta=500000.0)),
        ("model_config.quantization", "fp8"),
        ("model_config.quantization_config", {"bits": 4}),
        ("model_config.model_impl", "transformers"),
        ("model_config.runner_type", "pooling"),
        ("model_config.disable_sliding_window", True),
        ("model_config.multimodal_config", SimpleNamespace(video_pruning_rate=0.5)),
        ("model_config.multimodal_config", SimpleNamespace(mm_encoder_attn_dtype="fp8")),
        ("model_config.multimodal_config", SimpleNamespace(mm_encoder_fp8_scale_path="/scales.json")),
        ("lora_config", SimpleNamespace(target_modules=["q_proj"])),
        ("kernel_config", SimpleNamespace(moe_backend="marlin")),
        ("cache_config.kv_cache_dtype_skip_layers", ["0"]),
        ("load_config.load_format", "dummy"),
        ("speculative_config", DRAFT),
        ("attention_config.backend", "FLASHINFER"),
        ("cache_config.cache_dtype", "fp8"),
        ("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
        ("parallel_config.tensor_parallel_size", 2),
        ("parallel_config.pipeline_parallel_size", 2),
        ("parallel_config.prefill_context_parallel_size", 2),
        ("parallel_config.decode_context_parallel_size", 2),
        ("num_hash_lookahead_tokens", 1),
    ],
)
def test_every_setting_of_vllm_matters(path, value):
    config = vllm_config()
    config.num_hash_lookahead_tokens = 0
    before = describe(config, kv_cache_config())
    if path == "num_hash_lookahead_tokens":
        config.num_hash_lookahead_tokens = value
    else:
        config = changed(path, value)
    assert describe(config, kv_cache_config()) != before


def test_commit_of_a_remote_model_matters():
    config = vllm_config()
    config.model_config.hf_config._commit_hash = "abc"
    assert describe(config, kv_cache_config()) != describe(vllm_config(), kv_cache_config())


def test_where_a_config_was_found_does_not_matter():
    config = vllm_config()
    config.model_config.hf_config.values["_name_or_path"] = "/elsewhere"
    assert describe(config, kv_cache_config()) == describe(vllm_config(), kv_cache_config())


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_layout": "BLHNC"},
        {"hash_block_size": 8},
        {"kv_tp_replicas": 2},
    ],
)
def test_every_setting_of_the_kv_cache_matters(change):
    assert describe(vllm_config(), kv_cache_config(**change)) != describe(vllm_config(), kv_cache_config())


OTHER_VALUES = {int: lambda value: value + 16, bool: lambda value: not value}


@pytest.mark.parametrize("make", [attention, sliding])
def test_every_field_of_a_spec_matters(make):
    spec = make()
    before = describe(vllm_config(), kv_cache_config([spec]))
    tried = 0
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if type(value) not in OTHER_VALUES:
            continue
        tried += 1
        other = dataclasses.replace(spec, **{field.name: OTHER_VALUES[type(value)](value)})
        assert describe(vllm_config(), kv_cache_config([other])) != before, field.name
    assert tried >= 4
    half = dataclasses.replace(spec, dtype=torch.float16)
    assert describe(vllm_config(), kv_cache_config([half])) != before


def test_layers_and_groups_matter():
    one = kv_cache_config()
    renamed = kv_cache_config()
    renamed.kv_cache_groups[0].layer_names[0] = "layers.x"
    texts = {
        describe(vllm_config(), config)
        for config in (
            one,
            renamed,
            kv_cache_config(layers=3),
            kv_cache_config([attention(), attention()]),
            kv_cache_config([attention(), sliding()]),
            kv_cache_config([sliding(), attention()]),
        )
    }
    assert len(texts) == 6


def test_number_of_device_blocks_does_not_matter():
    assert describe(vllm_config(), kv_cache_config(num_blocks=16)) == describe(vllm_config(), kv_cache_config())


@pytest.mark.parametrize(
    "change", [{"data_parallel_size": 4, "data_parallel_rank": 3}, {"enable_expert_parallel": True}]
)
def test_data_and_expert_parallel_ranks_share(change):
    texts = []
    for fields in ({}, change):
        config = vllm_config()
        config.parallel_config = ParallelConfig(**fields)
        texts.append(describe(config, kv_cache_config()))
    assert texts[0] == texts[1]


def test_salt_matters():
    assert describe(vllm_config(), kv_cache_config(), Naming("mine")) != describe(vllm_config(), kv_cache_config())


def test_a_release_stands_for_how_it_hashes_and_lays_out_pages(monkeypatch):
    monkeypatch.setattr(schemes, "attention_backends", lambda *_: ["FLASH_ATTN"])
    texts = {}
    for release in ("0.31", "0.32", "0.33", "0.99", "1.0"):
        monkeypatch.setattr(compat, "vllm_release", lambda release=release: release)
        texts[release] = describe(vllm_config(), kv_cache_config())
    assert texts["0.31"] == texts["0.32"] == texts["0.33"]
    assert len(set(texts.values())) == 3, "a release that nobody has read shares with no other"


@pytest.mark.parametrize(
    ("backend", "spec"),
    [
        ("CPU_ATTN/vec", attention()),
        ("TURBOQUANT", attention()),
        ("FLASH_ATTN", attention(dtype=torch.uint8)),
        ("FLASH_ATTN", MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)),
    ],
)
def test_pages_that_kernels_pack_are_of_one_release(monkeypatch, backend, spec):
    monkeypatch.setattr(compat, "vllm_release", lambda: "0.32")
    assert schemes.page_scheme(kv_cache_config([spec]), [backend]) == "vllm 0.32"
    assert schemes.page_scheme(kv_cache_config([attention()]), ["FLASH_ATTN"]) == 2


def test_a_serialization_stands_for_its_python(monkeypatch):
    before = describe(vllm_config(), kv_cache_config())
    monkeypatch.setattr(sys, "version_info", SimpleNamespace(major=3, minor=99))
    assert describe(vllm_config(), kv_cache_config()) == before
    monkeypatch.setattr("pickle.dumps", lambda value, protocol: b"another pickle")
    assert describe(vllm_config(), kv_cache_config()) != before


def test_instruction_set_of_the_pages_matters(monkeypatch):
    texts = set()
    for isa in ("vec", "amx"):
        monkeypatch.setattr(schemes, "_resolve", lambda *_: "CPU_ATTN")
        monkeypatch.setattr(schemes, "instruction_set", lambda *_, isa=isa: isa)
        texts.add(describe(vllm_config(), kv_cache_config()))
    assert len(texts) == 2


def test_shuffled_pages_matter(monkeypatch):
    monkeypatch.setattr(schemes, "_resolve", lambda *_: "ROCM_AITER_FA")
    texts = set()
    for shuffles in (True, False):
        monkeypatch.setattr(schemes, "_shuffles_pages", lambda shuffles=shuffles: shuffles)
        texts.add(describe(vllm_config(), kv_cache_config()))
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("rope", "matters"),
    [
        ({"rope_type": "longrope"}, True),
        ({"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}, True),
        ({"rope_type": "one that nobody knows"}, True),
        ({"rope_type": "yarn"}, False),
        ({"rope_type": "llama3"}, False),
    ],
)
def test_max_model_len_matters_where_rotary_factors_depend_on_it(rope, matters):
    texts = set()
    for length in (1024, 4096):
        config = vllm_config(max_model_len=length)
        config.model_config.hf_config = HfConfig(text_config={"rope_parameters": rope})
        texts.add(describe(config, kv_cache_config()))
    assert len(texts) == (2 if matters else 1)


def test_length_that_vllm_has_shortened_is_not_one_that_was_asked_for():
    texts = set()
    for asked in (-1, 4096):
        config = vllm_config(max_model_len=4096)
        config.model_config.original_max_model_len = asked
        config.model_config.hf_config = HfConfig(rope_scaling={"type": "longrope"})
        texts.add(describe(config, kv_cache_config()))
    assert len(texts) == 2


def test_tuning_of_attention_matters():
    texts = {
        describe(config, kv_cache_config())
        for config in (llama4(8192), llama4(65536), llama4(8192, attn_temperature_tuning=True))
    }
    assert len(texts) == 3
    assert describe(vllm_config(max_model_len=1), kv_cache_config()) == describe(vllm_config(), kv_cache_config())


def test_tuning_that_a_worker_has_set_does_not_matter():
    tuned = llama4()
    tuned.model_config.hf_config.values["attn_temperature_tuning"] = True
    assert describe(tuned, kv_cache_config()) == describe(llama4(), kv_cache_config())


def test_scales_of_the_encoder_matter_by_content(tmp_path: Path):
    texts = set()
    for name, content in (("a.json", "1"), ("b.json", "1"), ("c.json", "2")):
        (tmp_path / name).write_text(content)
        multimodal = SimpleNamespace(mm_encoder_fp8_scale_path=str(tmp_path / name))
        texts.add(describe(changed("model_config.multimodal_config", multimodal), kv_cache_config()))
    assert len(texts) == 2


def copy_of_a_model(directory: Path, content: bytes = b"12345678") -> str:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(content)
    (directory / "model.safetensors.index.json").write_text("{}")
    return str(directory)


def test_weights_matter_by_content_not_by_place(tmp_path: Path):
    one = vllm_config(copy_of_a_model(tmp_path / "one"))
    two = vllm_config(copy_of_a_model(tmp_path / "two"))
    other = vllm_config(copy_of_a_model(tmp_path / "three", b"12345679"))
    assert describe(one, kv_cache_config()) == describe(two, kv_cache_config())
    assert describe(one, kv_cache_config()) != describe(other, kv_cache_config())


def test_weights_that_the_operator_vouches_for_are_not_read(tmp_path: Path):
    one = vllm_config(copy_of_a_model(tmp_path / "one"))
    other = vllm_config(copy_of_a_model(tmp_path / "two", b"other"))
    digests = Digests(tmp_path / "digests.json")
    mine = describe(one, kv_cache_config(), Naming(model_id="mine", digests=digests))
    digests.save()
    assert not (tmp_path / "digests.json").exists()
    assert mine == describe(other, kv_cache_config(), Naming(model_id="mine"))
    assert mine != describe(one, kv_cache_config(), Naming(model_id="yours"))
    other.model_config.hf_config = HfConfig(rope_theta=500000.0)
    assert mine != describe(other, kv_cache_config(), Naming(model_id="mine"))


def test_dummy_weights_are_those_of_any_place(tmp_path: Path):
    texts = set()
    for name, content in (("one", b"1"), ("two", b"2")):
        config = vllm_config(copy_of_a_model(tmp_path / name, content))
        config.load_config.load_format = "dummy"
        texts.add(describe(config, kv_cache_config()))
    assert len(texts) == 1


def test_code_that_a_model_brings_matters(tmp_path: Path):
    config = vllm_config(copy_of_a_model(tmp_path / "one"))
    (tmp_path / "one" / "modeling.py").write_text("a")
    config.model_config.hf_config = HfConfig(auto_map={"AutoModel": "modeling.Model"})
    texts = [describe(config, kv_cache_config())]
    config.model_config.trust_remote_code = True
    texts.append(describe(config, kv_cache_config()))
    (tmp_path / "one" / "modeling.py").write_text("b")
    texts.append(describe(config, kv_cache_config()))
    assert len(set(texts)) == 3


def test_seed_matters_and_is_not_written_down(monkeypatch):
    before = describe(vllm_config(), kv_cache_config())
    monkeypatch.setenv("PYTHONHASHSEED", "424242")
    after = describe(vllm_config(), kv_cache_config())
    assert after != before
    assert "424242" not in after


def test_a_random_hash_seed_is_reported(monkeypatch):
    config = changed("cache_config.prefix_caching_hash_algo", "xxhash_cbor")
    monkeypatch.setattr(schemes, "serialized_sample", lambda algorithm: "")
    assert random_seed(vllm_config()) is None
    assert "no later start of this one can find" in random_seed(config)
    random = describe(config, kv_cache_config())
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert random_seed(config) is None
    assert describe(config, kv_cache_config()) != random


def test_object_that_cannot_be_described_is_refused():
    config = changed("model_config.quantization_config", {"thing": object()})
    with pytest.raises(TypeError, match="cannot be part of"):
        describe(config, kv_cache_config())


MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=32
)
MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
RSWA = RSWASpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, rswa_window=32)


@pytest.mark.parametrize(
    ("spec", "kind", "window"),
    [
        (attention(), "full", 0),
        (MLA, "full", 0),
        (sliding(), "sliding_window", 64),
        (CHUNKED, "chunked_local", 32),
        (MAMBA, "state", 0),
        (RSWA, None, 0),
        (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": attention(), "b": attention()}), "full", 0),
        (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": attention(), "b": RSWA}), None, 0),
    ],
)
def test_kinds(spec, kind, window):
    assert compat.group_kind(spec) == kind
    assert compat.group_window(spec) == window


def test_kinds_that_are_served():
    for spec in (attention(), MLA, sliding(), CHUNKED, dataclasses.replace(MAMBA, mamba_cache_mode="align")):
        assert why_unsupported(vllm_config(), kv_cache_config([attention(), spec])) is None
    assert "RSWASpec, which is not known" in why_unsupported(vllm_config(), kv_cache_config([attention(), RSWA]))
    assert "keeps no states" in why_unsupported(vllm_config(), kv_cache_config([attention(), MAMBA]))
    assert "no KV cache" in why_unsupported(vllm_config(), kv_cache_config(kv_cache_groups=[]))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cache_config.enable_prefix_caching", False, "prefix caching is off"),
        ("aux_output_config", SimpleNamespace(enabled=True), "routed-experts"),
    ],
)
def test_vllms_own_word_that_prefixes_are_not_reusable(monkeypatch, path, value, message):
    monkeypatch.setattr(compat, "caps_external_hits", lambda: False)
    assert message in why_unsupported(changed(path, value), kv_cache_config())
    monkeypatch.setattr(compat, "caps_external_hits", lambda: True)
    assert (why_unsupported(changed(path, value), kv_cache_config()) is None) == (path == "aux_output_config")


def test_non_causal_attention_is_declined():
    groups = kv_cache_config([attention(), attention(non_causal=True)])
    assert "non-causal" in why_unsupported(vllm_config(), groups)
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": attention(), "b": attention(non_causal=True)})
    assert "non-causal" in why_unsupported(vllm_config(), kv_cache_config([both]))


def test_cross_attention_is_declined():
    """Its KV is that of the encoder's input. vLLM itself has no prefix caching for such models."""
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = kv_cache_config([attention(), cross])
    assert "CrossAttentionSpec" in why_unsupported(vllm_config(), groups)


def test_pooling_of_whole_prompts_is_declined_also_where_prefix_caching_is_forced():
    config = changed("model_config.runner_type", "pooling")
    assert why_unsupported(config, kv_cache_config()) is None
    config.model_config.is_prefix_caching_supported = False
    assert "pooling" in why_unsupported(config, kv_cache_config())


@pytest.mark.parametrize("spread", [{"nnodes": 2}, {"nnodes": 4, "nnodes_within_dp": 2}])
def test_tensor_parallelism_over_several_nodes_is_declined(spread):
    config = vllm_config(tensor_parallel_size=2)
    assert why_unsupported(config, kv_cache_config()) is None
    vars(config.parallel_config).update(spread)
    assert "over 2 nodes" in why_unsupported(config, kv_cache_config())


@pytest.mark.parametrize("name", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_context_parallelism_is_declined(name):
    assert name in why_unsupported(vllm_config(**{name: 2}), kv_cache_config())


def test_a_scheduler_for_each_rank_is_declined():
    config = vllm_config()
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.parallel_config.world_size = 2
    assert "external_launcher" in why_unsupported(config, kv_cache_config())
    config.parallel_config.world_size = 1
    assert why_unsupported(config, kv_cache_config()) is None
    assert why_unsupported(vllm_config(tensor_parallel_size=2), kv_cache_config()) is None


def test_group_sizes():
    groups = Groups.of(vllm_config(), kv_cache_config([attention(), attention(block_size=32)]))
    assert groups.kinds == ("full", "full")
    assert groups.block_tokens == (16, 32)
    assert groups.loaded == (0, 1)
    assert groups.dropped_tokens == 0
    assert (groups.engine_block_size, groups.alignment) == (32, 32)
    assert groups.registration([100, 200]) == [
        GroupRegistration("full", 32, payload_bytes, 0) for payload_bytes in (100, 100, 200)
    ]
    assert groups.hashes([b"0", b"1", b"2", b"3", b"4"]) == [b"1", b"3"]


def test_draft_groups_drop_tokens_unless_hashes_look_ahead():
    config = kv_cache_config()
    config.kv_cache_groups[0] = KVCacheGroupSpec(["layers.0"], attention(), is_eagle_group=True)
    assert Groups.of(vllm_config(), config).dropped_tokens == 16
    ahead = vllm_config()
    ahead.num_hash_lookahead_tokens = 1
    assert Groups.of(ahead, config).dropped_tokens == 0


@pytest.mark.parametrize(
    ("device", "rocm", "message"),
    [("cuda", True, "ROCm"), ("xpu", False, "type xpu"), ("tpu", False, "type tpu"), ("cuda", False, None)],
)
def test_devices_that_are_not_supported_are_named(monkeypatch, device, rocm, message):
    monkeypatch.setattr(compat, "is_rocm", lambda: rocm)
    config = vllm_config()
    config.device_config = SimpleNamespace(device_type=device)
    reason = why_unsupported(config, kv_cache_config())
    assert reason is None if message is None else message in reason
