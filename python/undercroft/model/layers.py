"""The KV cache of each layer of a model, from the model's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from undercroft.errors import ConfigError, cause
from undercroft.identity.weights import model_place

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_local",
    "linear_attention": "state",
}
"""The words of ``layer_types``, each with the engine's word."""
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4}
"""Model types whose older files lack ``layer_types``, with n: each n-th layer has full attention, others a window."""
_ALL_WINDOWS = ("mistral", "mixtral", "phi3", "starcoder2")
"""Model types whose ``sliding_window`` applies to each layer."""
_NOT_KNOWN = {
    "index_topk": "a sparse attention index",
    "num_kv_shared_layers": "layers that share a KV cache",
    "global_head_dim": "heads of two sizes",
    "mamba_d_state": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "ssm_cfg": "Mamba layers",
    "state_size": "Mamba layers",
    "linear_attn_config": "Kimi linear attention",
    "conv_L_cache": "short convolutions",
    "compress_ratios": "compressed attention",
}
"""Keys whose value is not empty only in models whose KV cache this module cannot compute."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The KV cache of one layer, all ranks together. Equal layers are in one group."""

    kind: str
    """The engine's word: "full", "sliding_window", "chunked_local" or "state"."""
    window: int
    """Tokens of the window or chunk; 0 if there is neither."""
    token_bytes: int
    """Bytes of one token's keys and values; 0 for a state."""
    state_bytes: int
    """Bytes of one state; 0 for attention."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Types of the stored values, by the names in `DTYPE_BYTES`; "auto": the type in the model's configuration."""

    dtype: str = "auto"
    kv_cache: str = "auto"
    state: str = "auto"


def read_config(model: str) -> dict[str, Any]:
    """The configuration of the text model: ``model`` is a file, a directory, or a name in Hugging Face's cache.

    Or it is the configuration's fields as a JSON object. Raises ConfigError if there is none.
    """
    if model.lstrip().startswith("{"):
        return _text_model(model, "the model", "its text")
    place = model_place(model, None)
    if place is None:
        raise ConfigError(
            f"model {model!r}: there is no such file or directory, and Hugging Face's cache on this machine does not "
            "hold it; give a config.json, fields of one as JSON, or download the model first"
        )
    path = place / "config.json" if place.is_dir() else place
    try:
        found = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r}: {path} cannot be read as a model's config.json ({cause(error)})") from None
    return _text_model(found, f"model {model!r}", str(path))


def _text_model(found: str, model: str, where: str) -> dict[str, Any]:
    """The text model's part of a configuration as JSON; the others name it in errors. Raises ConfigError."""
    try:
        config = json.loads(found)
    except ValueError as error:
        raise ConfigError(f"{model}: {where} cannot be read as a model's config.json ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{model}: {where} holds no object")
    text = next((config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict)), None)
    return config if text is None else config | text


def layers_of(config: Mapping[str, Any], precision: Precision, ranks: int = 1) -> list[Layer]:
    """The layers in order. ``ranks``: the size of tensor parallelism. Raises ConfigError for an unsupported model."""
    for key, meaning in _NOT_KNOWN.items():
        if config.get(key):
            raise ConfigError(
                f"the model has {meaning} ({key} in its config.json), whose KV cache undercroft size cannot tell; "
                "vLLM's log at start says how many tokens the device's own cache holds"
            )
    kv = DTYPE_BYTES[model_dtype(config, precision) if precision.kv_cache == "auto" else precision.kv_cache]
    token_bytes = _token_bytes(config, kv, ranks)
    made = []
    for kind in _kinds(config):
        if kind == "state":
            made.append(Layer(kind, 0, 0, _state_bytes(config, precision, ranks)))
        else:
            made.append(Layer(kind, _window(config, kind), token_bytes, 0))
    return made


def model_dtype(config: Mapping[str, Any], precision: Precision) -> str:
    """The type in which vLLM computes: the weights' type, but a type of half the size for float32."""
    if precision.dtype != "auto":
        return precision.dtype
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return named if named in ("bfloat16", "float16") else "bfloat16"


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The value of the first of the names in the configuration, a positive whole number. Raises ConfigError."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} = {value!r} in the model's config.json is not a positive number")
        return value
    raise ConfigError(f"the model's config.json has no {' or '.join(names)}: it is not that of a language model")


def _token_bytes(config: Mapping[str, Any], element: int, ranks: int) -> int:
    if config.get("kv_lora_rank"):
        # All ranks have the same latents, which are kept once.
        return (_number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")) * element
    heads = _number(config, "num_key_value_heads", "num_attention_heads")
    if config.get("head_dim") is not None:
        size = _number(config, "head_dim")
    else:
        size = _number(config, "hidden_size") // _number(config, "num_attention_heads")
    # If there are fewer heads than ranks, each rank has one head. Not every KV cache layout lets ranks keep it once.
    return 2 * max(1, heads // ranks) * ranks * size * element


def _state_bytes(config: Mapping[str, Any], precision: Precision, ranks: int) -> int:
    """Bytes of a Gated DeltaNet layer's state: the convolution's last inputs, and the matrix of each head."""
    if "linear_num_value_heads" not in config:
        raise ConfigError("the model has layers of linear attention of a kind that undercroft size does not know")
    key_heads, value_heads = _number(config, "linear_num_key_heads"), _number(config, "linear_num_value_heads")
    key, value = _number(config, "linear_key_head_dim"), _number(config, "linear_value_head_dim")
    kept = _number(config, "linear_conv_kernel_dim") - 1
    model = model_dtype(config, precision)
    state = precision.state if precision.state != "auto" else str(config.get("mamba_ssm_dtype") or model)
    channels = 2 * key_heads * key + value_heads * value
    return channels * kept * DTYPE_BYTES[model] + value_heads * key * value * DTYPE_BYTES[state]


def _kinds(config: Mapping[str, Any]) -> list[str]:
    count = _number(config, "num_hidden_layers")
    model_type = str(config.get("model_type", ""))
    named = config.get("layer_types")
    if named:
        unknown = sorted(set(named) - _KINDS.keys())
        if unknown or len(named) != count:
            raise ConfigError(f"layer_types in the model's config.json: {unknown or len(named)} is not known here")
        return [_KINDS[name] if _has_window(config, name) else "full" for name in named]
    if model_type == "llama4_text":
        return ["chunked_local" if rope else "full" for rope in _rope_layers(config, count)]
    if interval := config.get("full_attention_interval"):
        return ["full" if (layer + 1) % interval == 0 else "state" for layer in range(count)]
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ["full"] * count
    if model_type in _ALL_WINDOWS:
        return ["sliding_window"] * count
    if config.get("use_sliding_window"):
        first = int(config.get("max_window_layers", count))
        return ["sliding_window" if layer >= first else "full" for layer in range(count)]
    pattern = config.get("sliding_window_pattern", _PATTERNS.get(model_type))
    if isinstance(pattern, int) and model_type in _PATTERNS:
        return ["full" if pattern and (layer + 1) % pattern == 0 else "sliding_window" for layer in range(count)]
    raise ConfigError(
        f"the model's config.json has a sliding_window, but does not say which layers (no layer_types), and the model "
        f"type {model_type!r} is not known here; write layer_types into a copy of the file"
    )


def _has_window(config: Mapping[str, Any], name: str) -> bool:
    return name != "sliding_attention" or config.get("sliding_window") is not None


def _rope_layers(config: Mapping[str, Any], count: int) -> list[int]:
    interval = int(config.get("no_rope_layer_interval", 4))
    return list(config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)])


def _window(config: Mapping[str, Any], kind: str) -> int:
    if kind == "sliding_window":
        return _number(config, "sliding_window")
    return int(config.get("attention_chunk_size") or 8192) if kind == "chunked_local" else 0
