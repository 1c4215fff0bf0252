"""The namespace: a canonical description of everything that must be equal for cached bytes to be interchangeable.

The engine keeps caches of different descriptions apart by their SHA-256. In doubt a field is part of the description: a
needless field costs a cold start, while a missing field would serve another model's bytes. docs/identity.md explains
each field.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undercroft import compat
from undercroft.device.layout import kv_replicas
from undercroft.identity import schemes
from undercroft.identity.described_fields import TABLES, Fields
from undercroft.identity.plain import plain
from undercroft.identity.releases import FORMAT
from undercroft.identity.weights import SAMPLED, Digests, model_place, weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_LENGTH_MAX = 24 << 10
"""Most characters of a description in the directory's table: an entry of 32 KiB also holds the groups' sizes."""
_OWN_SEED = secrets.token_hex(16)
"""Replaces a random seed in the description: no other process has the same value."""
_SAFETENSORS_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor")
"""Load formats that read the same tensors from the same files in different ways."""
_POSITION_FREE_ROPE = {
    "default",
    "linear",
    "llama3",
    "ntk",
    "proportional",
    "mrope",
    "mllama4",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
}
"""Rotary embeddings whose factors depend on the model's own configuration alone, not on max_model_len."""
_READS_RUN_SETTINGS = ("Llama4",)
"""Beginnings of architectures' names: vLLM tunes their attention by max_model_len and by the generation config."""


@dataclasses.dataclass(frozen=True, slots=True)
class Naming:
    """The operator's options about the identity. Each field is the option of the same name."""

    salt: str = ""
    weights: str = SAMPLED
    model_id: str = ""
    digests: Digests = dataclasses.field(default_factory=Digests)


def describe(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    naming: Naming | None = None,
    common_shards: int = 0,
    *,
    has_all_stages: bool = False,
) -> str:
    """The description as canonical JSON: sorted keys, no spaces; equal settings give equal text in any process.

    ``common_shards``: into how many shards the ranks divide a payload that does not depend on them. The description is
    then that of a single rank. 0 for payloads that depend on the number of ranks. ``has_all_stages``: whether payloads
    and ``kv_cache_config`` have the layers of all pipeline stages. The description is then that of a single stage.

    Raises TypeError for a setting that cannot be described.
    """
    naming = naming or Naming()
    cache = vllm_config.cache_config
    backends = schemes.attention_backends(vllm_config, kv_cache_config)
    description = {
        "format": FORMAT,
        "salt": naming.salt,
        "model": _model(vllm_config.model_config, _part(vllm_config, "load_config"), naming),
        "draft": _draft(_part(vllm_config, "speculative_config"), naming),
        "cache_dtype": plain(cache.cache_dtype),
        "cache": _fields("CacheConfig", cache),
        "attention": {
            "backends": backends,
            **_fields("AttentionConfig", _part(vllm_config, "attention_config")),
        },
        "mamba": _fields("MambaConfig", _part(vllm_config, "mamba_config")) if _has_states(kv_cache_config) else {},
        "kernel": _fields("KernelConfig", _part(vllm_config, "kernel_config")),
        "lora": _fields("LoRAConfig", _part(vllm_config, "lora_config")),
        "diffusion": _fields("DiffusionConfig", _part(vllm_config, "diffusion_config")),
        "engram": _hash_of(_part(vllm_config, "engram_config")),
        "additional": _hash_of(_part(vllm_config, "additional_config")),
        "other": _unknown_fields("VllmConfig", vllm_config),
        "layout": kv_cache_config.kv_cache_layout,
        "pages": schemes.page_scheme(kv_cache_config, backends),
        "hash": _hash(vllm_config, kv_cache_config),
        "parallel": _parallel(vllm_config.parallel_config, kv_cache_config, common_shards)
        | ({"pipeline": 1} if has_all_stages else {}),
        "groups": [_group(group, common_shards) for group in kv_cache_config.kv_cache_groups],
    }
    return _fitting({name: value for name, value in description.items() if value not in ({}, None)})


def weight_version(description: str, version: str) -> str:
    """The description for weights that replace the described ones in the running vLLM, under this name."""
    return _fitting({**json.loads(description), "weight_version": version})


def _fitting(description: dict[str, Any]) -> str:
    """The description as text. If the text is too long for the directory's table, its longest parts become digests."""
    description = dict(description)
    while True:
        text = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        # The table holds the text as a JSON string, in which quotes and backslashes take two characters.
        if len(json.dumps(text)) <= _LENGTH_MAX:
            return text
        lengths = {name: len(json.dumps(value)) for name, value in description.items()}
        longest = max(lengths, key=lambda name: (lengths[name], name))
        value = json.dumps(description[longest], sort_keys=True, separators=(",", ":"))
        description[longest] = {"sha256": _digest(value)}


def known_by_name(description: str) -> list[str]:
    """Models in a description whose weights only a name identifies: no digest, no commit, no ``model_id``."""
    found = []
    parts = json.loads(description)
    for model in (parts.get("model"), (parts.get("draft") or {}).get("model")):
        names = (model or {}).get("names")
        if names and names[2] is None:
            found.append(str(names[0]))
    return found


def random_seed(vllm_config: VllmConfig) -> str | None:
    """The reason, for people, if block hashes have a random seed, so that no other process finds them; else None."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if compat.hash_seed(algorithm) is not None:
        return None
    return (
        f"prefix_caching_hash_algo = {algorithm} without PYTHONHASHSEED draws a random seed in each process, so no "
        "other process and no later start of this one can find any block that this process saves"
    )


def _part(vllm_config: Any, name: str) -> Any:
    return getattr(vllm_config, name, None)


def _model(model_config: Any, load_config: Any, naming: Naming) -> dict[str, Any]:
    hf_config = model_config.hf_config
    # Only in the worker's process, vLLM sets this field for Llama 4, from the field that is described as "generation".
    set_by_vllm = ("attn_temperature_tuning",) if _is_tuned(hf_config) else ()
    values = _content(hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config), set_by_vllm)
    brings_code = "auto_map" in values and bool(getattr(model_config, "trust_remote_code", False))
    described = {
        "architectures": plain(getattr(hf_config, "architectures", None)),
        "config": _digest(json.dumps(plain(values), sort_keys=True, separators=(",", ":"))),
        "dtype": plain(model_config.dtype),
        "runner": [plain(getattr(model_config, name, None)) for name in ("runner_type", "convert_type")],
        **_weights(model_config, load_config, naming, brings_code=brings_code),
        **_fields("ModelConfig", model_config),
    }
    if brings_code or reads_run_settings(hf_config, values):
        described["max_model_len"] = _lengths(model_config)
        described["generation"] = plain(_generation_config(model_config))
    multimodal = getattr(model_config, "multimodal_config", None)
    if multimodal is not None:
        described["multimodal"] = _fields("MultiModalConfig", multimodal)
        if scales := getattr(multimodal, "mm_encoder_fp8_scale_path", None):
            described["multimodal"]["fp8_scales"] = _file_digest(Path(scales))
    return described


def _content(values: Any, left_out: tuple[str, ...] = ()) -> Any:
    """A model's configuration without the place and the author of its file, and without ``left_out``."""
    if not isinstance(values, dict):
        return values
    left_out = ("_name_or_path", "transformers_version", "_commit_hash", *left_out)
    return {key: _content(value, left_out) for key, value in values.items() if key not in left_out}


def _weights(model_config: Any, load_config: Any, naming: Naming, *, brings_code: bool) -> dict[str, Any]:
    """The identity of the weights: the id that the operator gives, else a digest, else the names by which vLLM
    fetches the weights."""
    load_format = plain(getattr(load_config, "load_format", None))
    if load_format in _SAFETENSORS_FORMATS:
        load_format = "auto"
    described: dict[str, Any] = {"load_format": load_format}
    if extra := getattr(load_config, "model_loader_extra_config", None):
        described["loader"] = plain(extra)
    if naming.model_id:
        return {**described, "id": naming.model_id}
    if load_format == "dummy":
        return {**described, "weights": "dummy"}
    name = getattr(model_config, "model_weights", "") or model_config.model
    place = model_place(name, model_config.revision, getattr(load_config, "download_dir", None))
    # ignore_patterns has no effect here: vLLM applies them to downloads only.
    digest = weights_digest(place, naming.digests, naming.weights, code=brings_code) if place else ""
    if digest:
        described["weights"] = digest
        if brings_code:
            described["code_revision"] = model_config.code_revision
        return described
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    return {**described, "names": [name, model_config.revision, commit, model_config.code_revision]}


def reads_run_settings(hf_config: Any, hf_values: dict[str, Any]) -> bool:
    """Whether KV may depend on max_model_len and the generation config, in vLLM's own model code."""
    if not schemes.is_known_release():
        return True
    return _is_tuned(hf_config) or not set(_rope_types(hf_values)) <= _POSITION_FREE_ROPE


def _is_tuned(hf_config: Any) -> bool:
    return any(name.startswith(_READS_RUN_SETTINGS) for name in getattr(hf_config, "architectures", None) or [])


def _rope_types(values: Any, inside: bool = False) -> list[str]:
    """The kinds of rotary embeddings that a model's configuration names, itself or in an inner configuration."""
    if not isinstance(values, dict):
        return []
    found = []
    for key, value in values.items():
        if inside and key in ("rope_type", "type") and isinstance(value, str):
            found.append(value)
        found += _rope_types(value, inside or key in ("rope_parameters", "rope_scaling"))
    return found


def _lengths(model_config: Any) -> list[Any]:
    # With -1 vLLM shortens max_model_len after it has loaded the model. The loaded model keeps the first value.
    return [
        plain(getattr(model_config, name, None))
        for name in ("max_model_len", "original_max_model_len", "spec_target_max_model_len")
    ]


def _generation_config(model_config: Any) -> Any:
    found: dict[str, Any] = {}
    if hasattr(model_config, "try_get_generation_config"):
        found.update(model_config.try_get_generation_config())
    found.update(getattr(model_config, "override_generation_config", None) or {})
    return _content(found)


def _draft(speculative_config: Any, naming: Naming) -> dict[str, Any] | None:
    """The draft model's identity. The draft's layers may be in the same KV cache groups as the model's."""
    if speculative_config is None:
        return None
    draft = getattr(speculative_config, "draft_model_config", None)
    # The option model_id names the target model only.
    naming = dataclasses.replace(naming, model_id="")
    load_config = getattr(speculative_config, "draft_load_config", None)
    return {
        **_fields("SpeculativeConfig", speculative_config),
        "model": _model(draft, load_config, naming) if draft is not None else None,
    }


def _parallel(parallel_config: Any, kv_cache_config: KVCacheConfig, common_shards: int) -> dict[str, Any]:
    ranks, replicas = parallel_config.tensor_parallel_size, kv_replicas(kv_cache_config)
    if common_shards:
        ranks = replicas = 1
    return {
        "tensor": ranks,
        "pipeline": parallel_config.pipeline_parallel_size,
        "prefill_context": parallel_config.prefill_context_parallel_size,
        "decode_context": parallel_config.decode_context_parallel_size,
        "kv_replicas": replicas,
        "kv_shards": ranks // replicas,
        **_unknown_fields("ParallelConfig", parallel_config),
    }


def _hash(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return {
        "algorithm": algorithm,
        "scheme": schemes.hash_scheme(),
        # Only a digest is stored on disk: the seed of an algorithm that is not cryptographic is a secret.
        "seed": _digest(compat.hash_seed(algorithm) or _OWN_SEED),
        "block_tokens": compat.block_sizes(vllm_config, kv_cache_config)[0],
        "lookahead_tokens": compat.hash_lookahead_tokens(vllm_config),
        "serialized": schemes.serialized_sample(algorithm),
    }


def _group(group: Any, common_shards: int) -> dict[str, Any]:
    specs: list[list[Any]] = []
    for spec in map(_spec, compat.layer_specs(group.kv_cache_spec)):
        if common_shards > 1:
            spec["num_kv_heads"] *= common_shards
            spec["page_bytes"] *= common_shards
        # Successive equal layers are described once: the description must fit into the directory's table.
        if specs and specs[-1][1] == spec:
            specs[-1][0] += 1
        else:
            specs.append([1, spec])
    return {
        "kind": compat.group_kind(group.kv_cache_spec),
        "eagle": group.is_eagle_group,
        "layers": list(group.layer_names),
        "specs": specs,
    }


def _spec(spec: Any) -> dict[str, Any]:
    # Every field that is set counts, even if this version of undercroft does not know the field.
    values = {field.name: plain(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    values["class"] = type(spec).__name__
    values["page_bytes"] = getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _has_states(kv_cache_config: KVCacheConfig) -> bool:
    return any(compat.group_kind(group.kv_cache_spec) == "state" for group in kv_cache_config.kv_cache_groups)


def _fields(name: str, config: Any) -> dict[str, Any]:
    """Of one of vLLM's configurations: the described fields whose value is not the usual value, and unknown fields."""
    if config is None:
        return {}
    table = TABLES[name]
    found = {}
    for field, usual in table.described.items():
        value = plain(getattr(config, field, usual))
        if value != plain(usual):
            found[field] = value
    return {**found, **_unknown_fields(name, config)}


def _unknown_fields(name: str, config: Any) -> dict[str, Any]:
    table = TABLES[name]
    return {field: plain(getattr(config, field)) for field in unclassified(config, table)}


def unclassified(config: Any, table: Fields) -> list[str]:
    """Fields of a configuration, or of its class, that are in no table."""
    if not dataclasses.is_dataclass(config):
        return []
    known = {*table.described, *table.elsewhere, *table.harmless}
    return [field.name for field in dataclasses.fields(config) if field.name not in known]


def _hash_of(config: Any) -> Any:
    """vLLM's own hash of a configuration, else its values."""
    if not config:
        return None
    return config.compute_hash() if hasattr(config, "compute_hash") else plain(config)


def _file_digest(path: Path) -> str:
    # A missing file is described by its name.
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else str(path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
