"""The model's KV cache groups as the engine sees them, and whether this model can be served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from undercroft import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class Groups:
    """Sizes in tokens that lookups, loads and saves go by."""

    hash_tokens: int
    """Tokens per block hash."""
    alignment: int
    """Every hit is a multiple of this."""
    kinds: tuple[str, ...]
    """Per group, the engine's word for what a hit needs."""
    block_tokens: tuple[int, ...]
    """Per group, tokens in a block; 0 for a group that is neither saved nor loaded."""
    windows: tuple[int, ...]
    """Per group, tokens of its window or chunk; 0 where there is none."""
    dropped_tokens: int
    """Tokens at the end of a hit that must be computed anew: a draft layer's KV there depends on the token after."""

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Groups:
        """From vLLM's configuration."""
        hash_tokens, alignment = compat.block_sizes(vllm_config, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        kinds = tuple(compat.group_kind(group.kv_cache_spec) or "ignored" for group in groups)
        eagle = any(group.is_eagle_group for group in groups)
        return cls(
            hash_tokens,
            alignment,
            kinds,
            tuple(
                0 if kind == "ignored" else group.kv_cache_spec.block_size
                for kind, group in zip(kinds, groups, strict=True)
            ),
            tuple(compat.group_window(group.kv_cache_spec) for group in groups),
            alignment if eagle and not compat.hash_lookahead_tokens(vllm_config) else 0,
        )

    @property
    def loaded(self) -> tuple[int, ...]:
        """Indexes of the groups that a load fills."""
        return tuple(group for group, tokens in enumerate(self.block_tokens) if tokens)

    def align(self, tokens: int) -> int:
        """``tokens`` rounded down to where a hit may end."""
        return tokens // self.alignment * self.alignment

    def usable(self, boundary: int) -> int:
        """How much of a cached prefix of ``boundary`` tokens may be loaded."""
        return max(0, self.align(boundary - self.dropped_tokens))

    def registration(self, payload_bytes: list[int]) -> list[tuple[str, int, int, int]]:
        """The groups as `_core.Engine.register` takes them; ``payload_bytes`` per group, all ranks together."""
        return [
            (kind, tokens, size if tokens else 0, window)
            for kind, tokens, size, window in zip(
                self.kinds, self.block_tokens, payload_bytes, self.windows, strict=True
            )
        ]


def why_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why the connector must stay off for this model and deployment, for people; None if it need not."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            return f"{name} = {size} is not supported (only tensor parallelism is)"
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        names = sorted({type(inner).__name__ for inner in compat.layer_specs(spec)})
        kind = compat.group_kind(spec)
        if group.host_resident or not group.enable_kv_transfer:
            return f"KV cache group {index} ({', '.join(names)}) is not transferable"
        if kind != "full":
            return (
                f"KV cache group {index} is {', '.join(names)}; only models all of whose groups are full attention "
                "or MLA are supported"
            )
    return None
