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
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    UniformTypeKVCacheSpecs,
)

from fake_config import HfConfig, attention, kv_cache_config, sliding, vllm_config
from undercroft import compat
from undercroft.connector.groups import Groups, why_unsupported
from undercroft.connector.namespace import describe, random_seed_warning


@pytest.fixture(autouse=True)
def no_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def test_same_settings_same_text():
    assert describe(vllm_config(), kv_cache_config()) == describe(vllm_config(), kv_cache_config())


def test_canonical_form():
    text = describe(vllm_config(), kv_cache_config())
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert json.loads(text)["format"] == 1


def test_same_text_in_another_process():
    script = (
        "from fake_config import *; from undercroft.connector.namespace import describe;"
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


def test_salt_and_vllm_release_matter(monkeypatch):
    before = describe(vllm_config(), kv_cache_config())
    assert describe(vllm_config(), kv_cache_config(), "mine") != before
    monkeypatch.setattr(compat, "vllm_release", lambda: "9.9")
    assert describe(vllm_config(), kv_cache_config()) != before


def test_python_matters_only_where_hashes_are_of_pickles(monkeypatch):
    cbor = changed("cache_config.prefix_caching_hash_algo", "sha256_cbor")
    pickled_before, cbor_before = describe(vllm_config(), kv_cache_config()), describe(cbor, kv_cache_config())
    monkeypatch.setattr(sys, "version_info", SimpleNamespace(major=3, minor=99))
    assert describe(vllm_config(), kv_cache_config()) != pickled_before
    assert describe(cbor, kv_cache_config()) == cbor_before


def test_weights_on_disk_matter(tmp_path: Path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"12345678")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    os.utime(weights, ns=(1, 1))
    text = describe(vllm_config(str(tmp_path)), kv_cache_config())
    assert text == describe(vllm_config(str(tmp_path)), kv_cache_config())
    (tmp_path / "notes.txt").write_text("nothing to do with it")
    assert text == describe(vllm_config(str(tmp_path)), kv_cache_config())
    seen = {text}
    os.utime(weights, ns=(2, 2))
    seen.add(describe(vllm_config(str(tmp_path)), kv_cache_config()))
    weights.write_bytes(b"123456789")
    os.utime(weights, ns=(2, 2))
    seen.add(describe(vllm_config(str(tmp_path)), kv_cache_config()))
    index.write_text('{"a": 1}')
    seen.add(describe(vllm_config(str(tmp_path)), kv_cache_config()))
    (tmp_path / "more.safetensors").write_bytes(b"")
    seen.add(describe(vllm_config(str(tmp_path)), kv_cache_config()))
    assert len(seen) == 5


def test_seed_matters_and_is_not_written_down(monkeypatch):
    before = describe(vllm_config(), kv_cache_config())
    monkeypatch.setenv("PYTHONHASHSEED", "424242")
    after = describe(vllm_config(), kv_cache_config())
    assert after != before
    assert "424242" not in after


def test_random_seed_is_warned_of(monkeypatch):
    config = changed("cache_config.prefix_caching_hash_algo", "xxhash")
    assert random_seed_warning(vllm_config()) is None
    assert "PYTHONHASHSEED" in random_seed_warning(config)
    random = describe(config, kv_cache_config())
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert random_seed_warning(config) is None
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
    "name", ["pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"]
)
def test_only_tensor_parallelism_is_served(name):
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
    assert (groups.unit, groups.alignment) == (32, 32)
    assert groups.registration([100, 200]) == [("full", 32, 100, 0), ("full", 32, 100, 0), ("full", 32, 200, 0)]
    assert groups.hashes([b"0", b"1", b"2", b"3", b"4"]) == [b"1", b"3"]


def test_draft_groups_drop_tokens_unless_hashes_look_ahead():
    config = kv_cache_config()
    config.kv_cache_groups[0] = KVCacheGroupSpec(["layers.0"], attention(), is_eagle_group=True)
    assert Groups.of(vllm_config(), config).dropped_tokens == 16
    ahead = vllm_config()
    ahead.num_hash_lookahead_tokens = 1
    assert Groups.of(ahead, config).dropped_tokens == 0
