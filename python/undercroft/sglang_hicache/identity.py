"""The namespace of a pool's pages: everything that must be equal for their bytes to be interchangeable."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from undercroft.identity.weights import Digests, model_place, weights_digest

if TYPE_CHECKING:
    from undercroft.config import UndercroftConfig
    from undercroft.sglang_hicache.pools import Pool

FORMAT = 2
"""Version of the description. Raise it when the reading of SGLang's pools changes."""
_SETTINGS = {
    "model": (
        "context_length",
        "custom_weight_loader",
        "dtype",
        "is_embedding",
        "json_model_override_args",
        "kv_cache_dtype",
        "load_format",
        "model_config_parser",
        "model_impl",
        "model_loader_extra_config",
        "modelopt_quant",
        "qsa_indexer_dtype",
        "quantization",
        "quantize_and_serve",
        "rl_quant_profile",
    ),
    "exec": (
        "attention_backend",
        "dllm_algorithm",
        "dsv4_attn_backend",
        "enable_precise_embedding_interpolation",
        "kt_method",
        "enable_encoder_swa_bounded_replay",
        "enable_decoder_swa_bounded_replay",
        "enable_fused_qk_norm_rope",
        "enable_int8_mamba_checkpoint",
        "enable_mamba_cache_stochastic_rounding",
        "enable_tf32_matmul",
        "linear_attn_backend",
        "mamba_backend",
        "mamba_ssm_dtype",
        "prefill_attention_backend",
        "prefill_kv_cache_dequant_dtype",
        "rl_on_policy_target",
    ),
    "mm": ("disable_fast_image_processor", "enable_multimodal", "image_processor_backend", "mm_process_config"),
    "parallel": ("cp_strategy", "enable_dsa_cache_layer_split", "enable_prefill_cp"),
    "spec": (
        "speculative_algorithm",
        "speculative_draft_kv_cache_dtype",
        "speculative_draft_model_quantization",
        "speculative_draft_window_size",
        "speculative_draft_sink_size",
    ),
}
"""The server's arguments on which KV depends, by SGLang's namespace of them (``sglang.srt.runtime_context``)."""
_CONFIGURATIONS = ("config.json", "hf_quant_config.json", "preprocessor_config.json", "processor_config.json")
"""Files beside the weights whose content decides KV."""
_VARIABLES = re.compile(
    "SGLANG_.*(ATTN|DSA|DSV4|DTYPE|FP4|FP8|GEMM|INDEX|INT8|KV|LAYOUT|MAMBA|MLA|MOE|PAGE8|QUANT|ROPE|SSM|SWA)"
)
"""Environment variables that choose how KV is computed, or how it lies in a page: SGLang has hundreds, and more with
each release, so one that need not count is better than one that is missed."""
_HARMLESS = re.compile("SGLANG_(KV_CANARY|TEST_|CHECK_)")
_FILES = ("quantization_param_path", "decrypted_config_file", "dllm_algorithm_config")
"""Arguments that name a file whose content decides KV."""
_OTHER_WEIGHTS = ("kt_weight_path", "uno_lora_path")
"""Arguments that name further weights."""


def why_off(arguments: Any) -> str | None:
    """The reason, for people, if the keys of SGLang's pages do not tell all prompts apart; else None.

    ``arguments``: SGLang's arguments, or None outside its server.
    """
    if getattr(arguments, "trust_mm_content_hashes", False):
        return (
            "with --trust-mm-content-hashes, clients name their images by hashes that SGLang does not check, so one "
            "client could be given the pages of another"
        )
    return None


def describe(storage_config: Any, arguments: Any, config: UndercroftConfig, digests: Digests, pool: Pool) -> str:
    """The description as canonical JSON.

    ``storage_config``: SGLang's ``HiCacheStorageConfig``. Raises OSError for a weight file that cannot be read.
    """
    import sglang

    one_copy = storage_config.is_mla_model and pool.is_same_on_ranks
    description = {
        "hicache": FORMAT,
        "salt": config.namespace_salt,
        "model": _model(storage_config.model_name, arguments, config, digests),
        "kv_cache_dtype": _resolved_kv_cache_dtype(),
        # Another release may order a page of the same size in another way, or compute KV in another way.
        "sglang": sglang.__version__,
        "variables": _variables(),
        "settings": {area: _values(arguments, names) for area, names in _SETTINGS.items()},
        "files": {name: _file_digest(getattr(arguments, name, None)) for name in _FILES},
        "pool": pool.description(),
        "tp": [0, 0] if one_copy else [storage_config.tp_rank, storage_config.tp_size],
        "pp": [storage_config.pp_rank, storage_config.pp_size],
        "cp": [storage_config.attn_cp_rank, storage_config.attn_cp_size],
        "dcp": [storage_config.dcp_rank, storage_config.dcp_size],
    }
    return json.dumps(description, sort_keys=True, separators=(",", ":"))


def _model(model_name: str | None, arguments: Any, config: UndercroftConfig, digests: Digests) -> dict[str, Any]:
    """The weights, by ``model_id``, by content, or else by name, and those of the draft model and of adapters."""
    of = _Weights(getattr(arguments, "download_dir", None), config.weights, digests)
    found: dict[str, Any] = {"id": config.model_id}
    if not config.model_id:
        path = getattr(arguments, "model_path", None) or model_name or ""
        found = {"weights": of.model(path, getattr(arguments, "revision", None))}
    if draft := getattr(arguments, "speculative_draft_model_path", None):
        found["draft"] = of.model(draft, getattr(arguments, "speculative_draft_model_revision", None))
    for name in _OTHER_WEIGHTS:
        if path := getattr(arguments, name, None):
            found[name] = of.model(path, None)
    # SGLang's key of an adapter that it loads at its start is made of its name and path only.
    adapters = _adapters(getattr(arguments, "lora_paths", None))
    found["adapters"] = [[name, path, of.model(path, None)] for name, path in adapters]
    return found


def _adapters(given: Any) -> list[tuple[str, str]]:
    """Name and path of the adapters of ``--lora-paths``, in each form that SGLang takes."""
    if isinstance(given, Mapping):
        return [(str(name), str(path)) for name, path in given.items()]
    found = []
    for one in given or ():
        if isinstance(one, str):
            name, separator, path = one.partition("=")
            found.append((name, path if separator else name))
        elif isinstance(one, Mapping):
            found.append((str(one.get("lora_name")), str(one.get("lora_path"))))
        else:
            found.append((str(getattr(one, "lora_name", None)), str(getattr(one, "lora_path", None))))
    return found


def _resolved_kv_cache_dtype() -> str | None:
    """The data type that SGLang has chosen, where the argument leaves it to the hardware."""
    from sglang.srt.runtime_context import get_model

    try:
        return str(get_model().kv_cache_dtype)
    except (ValueError, AttributeError):  # outside a server
        return None


class _Weights(NamedTuple):
    download_dir: str | None
    how: str
    digests: Digests

    def model(self, name: str, revision: str | None) -> dict[str, Any]:
        """The weights and the configuration of a model, by content if its files are here, else by name."""
        place = model_place(name, revision, self.download_dir) if name else None
        digest = weights_digest(place, self.digests, self.how, code=True) if place else ""
        if place is None or not digest:
            return {"names": [name, revision]}
        files = [place / one for one in _CONFIGURATIONS] if place.is_dir() else []
        return {"digest": digest, "files": {one.name: _file_digest(one) for one in files if one.is_file()}}


def _variables() -> dict[str, str]:
    """The environment variables of `_VARIABLES` that are set."""
    counts = {name for name in os.environ if _VARIABLES.match(name) and not _HARMLESS.match(name)}
    return {name: os.environ[name] for name in sorted(counts)}


def _values(arguments: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that are set, as JSON can hold them."""
    values = {name: getattr(arguments, name, None) for name in names}
    return {
        name: value if isinstance(value, (bool, int, float, str)) else repr(value)
        for name, value in values.items()
        if value is not None
    }


def known_by_name(description: str) -> list[str]:
    """The models and adapters in a description that only a name identifies."""
    model = json.loads(description)["model"]
    names = ("weights", "draft", *_OTHER_WEIGHTS)
    parts = [*(model.get(name) for name in names), *(one for *_, one in model.get("adapters", ()))]
    return [str(part["names"][0]) for part in parts if part and "names" in part]


def _file_digest(path: Any) -> str | None:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None
