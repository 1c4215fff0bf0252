"""The namespace: a canonical description of everything that must be equal for cached bytes to be interchangeable.

The engine keeps caches of different descriptions apart by their SHA-256. When in doubt a field is in: a needless one
costs a cold start, a missing one serves another model's bytes.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import secrets
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undercroft import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FORMAT = 1
"""Version of the description. Raise it when a change makes older caches unusable."""
_HASH_SCHEME = 1
"""vLLM's way to build a block hash: tagged extra keys (0.31 and later)."""
_OWN_SEED = secrets.token_hex(16)
"""Stands for a seed that no other process has."""
_PICKLING_ALGORITHMS = ("sha256", "xxhash")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
_MODEL_FIELDS = (
    "quantization",
    "quantization_config",
    "model_impl",
    "runner_type",
    "convert_type",
    "disable_sliding_window",
    "code_revision",
)
_MULTIMODAL_FIELDS = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method")


def describe(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, salt: str = "") -> str:
    """The description as canonical JSON: sorted keys, no spaces; equal settings give equal text in any process."""
    hash_tokens, _ = compat.block_sizes(vllm_config, kv_cache_config)
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    description = {
        "format": FORMAT,
        "salt": salt,
        "vllm": compat.vllm_release(),
        "model": _model(vllm_config.model_config),
        "load_format": _plain(getattr(getattr(vllm_config, "load_config", None), "load_format", None)),
        "draft": _draft(getattr(vllm_config, "speculative_config", None)),
        "cache_dtype": _plain(cache.cache_dtype),
        "attention_backend": _plain(_attention_backend(vllm_config)),
        "layout": kv_cache_config.kv_cache_layout,
        "hash": {
            "algorithm": cache.prefix_caching_hash_algo,
            "scheme": _HASH_SCHEME,
            "seed": _seed(cache.prefix_caching_hash_algo),
            "block_tokens": hash_tokens,
            "lookahead_tokens": compat.hash_lookahead_tokens(vllm_config),
            "python": _pickling_python(cache.prefix_caching_hash_algo),
        },
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "kv_replicas": getattr(kv_cache_config, "kv_tp_replicas", 1),
        },
        "groups": [_group(group) for group in kv_cache_config.kv_cache_groups],
    }
    return json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def random_seed_warning(vllm_config: VllmConfig) -> str | None:
    """What to tell the operator when block hashes differ from process to process, so that persistence is useless."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if compat.hash_seed(algorithm) is not None:
        return None
    return (
        f"undercroft: prefix_caching_hash_algo = {algorithm} has a random seed in each process, so nothing "
        "that is saved will be found after a restart or by another process. Set PYTHONHASHSEED to the same value "
        "everywhere, or use sha256 or sha256_cbor."
    )


def _model(model_config: Any) -> dict[str, Any]:
    hf_config = model_config.hf_config
    multimodal = getattr(model_config, "multimodal_config", None)
    return {
        "name": model_config.model,
        "revision": model_config.revision,
        "commit": getattr(hf_config, "_commit_hash", None),
        "config": _digest(_hf_config_json(hf_config)),
        "weights": weight_files(getattr(model_config, "model_weights", "") or model_config.model),
        "dtype": _plain(model_config.dtype),
        **{name: _plain(getattr(model_config, name, None)) for name in _MODEL_FIELDS},
        "multimodal": {name: _plain(getattr(multimodal, name, None)) for name in _MULTIMODAL_FIELDS},
    }


def _draft(speculative_config: Any) -> dict[str, Any] | None:
    """The draft model's identity: its layers may lie in the same groups."""
    if speculative_config is None:
        return None
    draft = getattr(speculative_config, "draft_model_config", None)
    return {
        "method": _plain(getattr(speculative_config, "method", None)),
        "model": _model(draft) if draft is not None else None,
    }


def _attention_backend(vllm_config: VllmConfig) -> Any:
    attention = getattr(vllm_config, "attention_config", None)
    return [getattr(attention, "backend", None), getattr(attention, "backend_per_kind", None)]


def _hf_config_json(hf_config: Any) -> str:
    values = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    # Where the file was found and who wrote it say nothing about the model.
    values = {key: value for key, value in values.items() if key not in ("_name_or_path", "transformers_version")}
    return json.dumps(_plain(values), sort_keys=True, separators=(",", ":"))


def weight_files(model: str) -> list[list[Any]]:
    """Names, sizes and times of a local model's weight files, and its indexes' digests; empty for a remote name."""
    path = Path(model)
    if path.is_file():
        return [_file(path, path.name)]
    if not path.is_dir():
        return []
    files = []
    for entry in sorted(path.rglob("*")):
        if not entry.is_file():
            continue
        name = entry.relative_to(path).as_posix()
        if entry.suffix in _WEIGHT_SUFFIXES:
            files.append(_file(entry, name))
        elif entry.name.endswith(".index.json"):
            files.append([name, hashlib.sha256(entry.read_bytes()).hexdigest()])
    return files


def _file(path: Path, name: str) -> list[Any]:
    status = path.stat()
    return [name, status.st_size, status.st_mtime_ns]


def _group(group: Any) -> dict[str, Any]:
    specs = [_spec(spec) for spec in compat.layer_specs(group.kv_cache_spec)]
    return {
        "kind": compat.group_kind(group.kv_cache_spec),
        "eagle": group.is_eagle_group,
        "layers": list(group.layer_names),
        "specs": specs,
    }


def _spec(spec: Any) -> dict[str, Any]:
    # Every field, also those this version of undercroft has never heard of.
    values = {field.name: _plain(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    values["class"] = type(spec).__name__
    values["page_bytes"] = getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)
    return values


def _seed(algorithm: str) -> str:
    # A digest, since the seed of an algorithm that is not cryptographic is a secret and this is stored on disk.
    return _digest(compat.hash_seed(algorithm) or _OWN_SEED)


def _pickling_python(algorithm: str) -> str | None:
    """Python's minor version where the algorithm hashes pickles, which are not promised to stay the same."""
    return f"{sys.version_info.major}.{sys.version_info.minor}" if algorithm in _PICKLING_ALGORITHMS else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it, the same in every process."""
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, (float, Fraction)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(inner), sort_keys=True) for inner in value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    text = str(value)
    if " object at 0x" in text:
        raise TypeError(f"undercroft: a {type(value).__name__} cannot be part of the cache's namespace: {text}")
    return text
