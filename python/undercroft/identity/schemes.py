"""Properties of vLLM's version, Python's version and the machine, for the description: how hashes are made, how pages
are laid out, which attention backend writes them.

A version that changes none of these properties keeps the cache warm. For an unknown version the description holds the
version itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from undercroft import compat
from undercroft.identity.plain import plain
from undercroft.identity.releases import RELEASES
from undercroft.log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


_PLAIN_BACKENDS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}
"""Backends that write keys and values unchanged, at the strides of the layout. Other backends pack them in kernels,
and any release may change these kernels."""
_PLAIN_SPECS = {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
_PLAIN_DTYPES = {"torch.float32", "torch.float16", "torch.bfloat16"}
_SAMPLE = (bytes(range(32)), (1, 200, 70_000, 5_000_000_000), (("lora", "name"), None, 0.5))


def is_known_release() -> bool:
    """Whether the properties of this release of vLLM are known."""
    return compat.vllm_release() in RELEASES


def hash_scheme() -> int | str:
    """The number of this vLLM's block hashes; its release if the release is unknown."""
    release = compat.vllm_release()
    return RELEASES[release].block_hash if release in RELEASES else f"vllm {release}"


def page_scheme(kv_cache_config: KVCacheConfig, backends: list[str]) -> int | str:
    """The number of this vLLM's page layout; its release if kernels pack the pages or the release is unknown."""
    release = compat.vllm_release()
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in compat.layer_specs(group.kv_cache_spec)]
    are_plain = set(backends) <= _PLAIN_BACKENDS and all(map(_is_plain, specs))
    return RELEASES[release].page if release in RELEASES and are_plain else f"vllm {release}"


def _is_plain(spec: Any) -> bool:
    mode = getattr(spec, "kv_quant_mode", None)
    unquantized = mode is None or getattr(mode, "name", "") == "NONE"
    return type(spec).__name__ in _PLAIN_SPECS and str(spec.dtype) in _PLAIN_DTYPES and unquantized


def serialized_sample(algorithm: str) -> str:
    """The start of the hash of a fixed value. It changes if Python's pickle or the CBOR library writes other bytes."""
    from vllm.utils.hashing import get_hash_fn_by_name

    return str(get_hash_fn_by_name(algorithm)(_SAMPLE).hex()[:16])


def attention_backends(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """Names of the backends that write the groups' pages on this machine. On CPUs each name has the instruction set
    that decides how a page is packed."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in compat.layer_specs(group.kv_cache_spec)]
    return sorted({_backend(vllm_config, spec) for spec in specs if isinstance(spec, AttentionSpec)})


def _backend(vllm_config: VllmConfig, spec: Any) -> str:
    """The backend for layers with this spec. If vLLM cannot resolve it here: the configured backend and the machine."""
    try:
        name = _resolve(vllm_config, spec)
    except Exception as error:  # a platform's selector may raise anything
        logger.debug("undercroft: the attention backend was not resolved: %s", error)
        configured = getattr(vllm_config.attention_config, "backend", None)
        return f"{plain(configured) or 'auto'} on {_machine()}"
    if name.startswith("CPU_ATTN"):
        return f"{name}/{instruction_set(vllm_config, spec)}"
    return f"{name}/shuffled" if _shuffles_pages() else name


def _resolve(vllm_config: VllmConfig, spec: Any) -> str:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    is_mla = isinstance(spec, MLAAttentionSpec)
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            head_size=spec.head_size,
            dtype=vllm_config.model_config.dtype,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            use_mla=is_mla,
            use_sparse=is_mla and getattr(vllm_config.model_config.hf_text_config, "index_topk", None) is not None,
            has_sliding_window=getattr(spec, "sliding_window", None) is not None,
        )
    return str(backend.get_name())


def instruction_set(vllm_config: VllmConfig, spec: Any) -> str:
    """The instruction set whose code packs the pages of vLLM's attention on CPUs: "amx" and "vec" pages differ."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(
            _get_attn_isa(
                vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
            )
        )
    except (ImportError, TypeError):  # another version of vLLM has other functions
        return _machine()


def _machine() -> str:
    """The processor's kind, and its extensions on which pages may depend."""
    import platform

    import torch

    tests = {"amx": "_is_amx_tile_supported", "avx512": "_is_avx512_supported"}
    found = [name for name, test in tests.items() if hasattr(torch.cpu, test) and getattr(torch.cpu, test)()]
    return "+".join([platform.machine(), *found])


def _shuffles_pages() -> bool:
    """Whether pages have the shuffled layout of AMD's kernels."""
    from vllm import envs
    from vllm.platforms import current_platform

    return current_platform.is_rocm() and bool(getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False))
