"""The model's KV cache groups as the engine sees them, and whether this model can be served."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from undercroft import compat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_Hash = TypeVar("_Hash", bound=bytes)

PARTS_MAX = 32
"""Groups that the engine can tell apart."""


@dataclass(frozen=True, slots=True)
class Part:
    """What the engine takes for a group: one block of a KV cache group in every unit."""

    group: int
    kind: str
    window: int
    block_tokens: int
    """Tokens from one block to the next as the engine counts them; 0 if it is neither saved nor loaded."""
    per_block: int = 1
    """Blocks of the KV cache group in ``block_tokens``."""
    index: int = 0
    """Which of them this is."""

    def position(self, block: int) -> int:
        """The position in the KV cache group's block table of the engine's block ``block``."""
        return block * self.per_block + self.index

    def needed(self, boundary: int) -> range:
        """The engine's blocks that a hit of ``boundary`` tokens needs, for groups that keep only some."""
        end = boundary // self.block_tokens
        if self.kind == "sliding_window":
            return range(max(0, end - max(1, -(-(self.window - 1) // self.block_tokens))), end)
        if self.kind == "chunked_local":
            return range(boundary // self.window * self.window // self.block_tokens, end)
        return range(end - 1, end)


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
    """How far a hit must end before the end of what is cached: a draft layer's KV depends on the token after."""
    unit: int = field(init=False)
    """Tokens of one node of the engine's index: a block of every group ends with each, so that every node has all
    that its chain needs to be found again after a restart."""
    parts: tuple[Part, ...] = field(init=False)
    """The engine's groups."""
    tail_step: int = field(init=False)
    """Inside a block, hits may end at multiples of this; 0 where they may not, or vLLM offers no state there."""

    def __post_init__(self) -> None:
        unit = math.lcm(self.hash_tokens, *(tokens for tokens in self.block_tokens if tokens))
        parts = tuple(self._split(unit))
        if len(parts) > PARTS_MAX:
            unit, parts = self.hash_tokens, tuple(self._split(0))
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "tail_step", self.alignment if self._has_tails(unit) else 0)
        object.__setattr__(self, "alignment", math.lcm(self.alignment, unit))

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Groups:
        """From vLLM's configuration."""
        hash_tokens, alignment = compat.block_sizes(vllm_config, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        kinds = tuple(compat.group_kind(group.kv_cache_spec) or "ignored" for group in groups)
        block_tokens = tuple(
            0 if kind == "ignored" else group.kv_cache_spec.block_size
            for kind, group in zip(kinds, groups, strict=True)
        )
        drops = compat.drops_last_block(vllm_config) or any(group.is_eagle_group for group in groups)
        if drops:
            # Whole blocks only: no tails beside a draft.
            alignment = math.lcm(alignment, *(tokens for tokens in block_tokens if tokens))
        return cls(
            hash_tokens,
            alignment,
            kinds,
            block_tokens,
            tuple(compat.group_window(group.kv_cache_spec) for group in groups),
            alignment if drops and not compat.hash_lookahead_tokens(vllm_config) else 0,
        )

    def _has_tails(self, unit: int) -> bool:
        alike = set(self.block_tokens) <= {0, unit} and set(self.kinds) <= {"full", "state", "ignored"}
        finer = self.alignment < unit and unit % self.alignment == 0 == self.alignment % self.hash_tokens
        return alike and finer and self.has_states and not self.dropped_tokens

    def _split(self, unit: int) -> list[Part]:
        """The parts for nodes of ``unit`` tokens; 0 leaves each group whole."""
        parts = []
        for group, (kind, tokens, window) in enumerate(zip(self.kinds, self.block_tokens, self.windows, strict=True)):
            count = unit // tokens if unit and tokens else 1
            for index in range(count):
                # A block that ends before its unit does leaves the window so much sooner.
                before = (count - 1 - index) * tokens
                if before and (kind == "state" or (kind == "sliding_window" and before >= window - 1)):
                    continue
                narrowed = window - before if kind == "sliding_window" else window
                parts.append(Part(group, kind, narrowed, count * tokens, count, index))
        return parts

    @property
    def loaded(self) -> tuple[int, ...]:
        """Indexes of the groups that a load fills."""
        return tuple(group for group, tokens in enumerate(self.block_tokens) if tokens)

    @property
    def has_windows(self) -> bool:
        """Whether some group gives up blocks that have left its window or chunk."""
        return any(kind in ("sliding_window", "chunked_local") for kind in self.kinds)

    @property
    def has_states(self) -> bool:
        """Whether some group carries a state."""
        return "state" in self.kinds

    def align(self, tokens: int) -> int:
        """``tokens`` rounded down to where a hit may end."""
        return tokens // self.alignment * self.alignment

    def hashes(self, block_hashes: list[_Hash]) -> list[_Hash]:
        """The hashes of whole units; the list itself where each is one."""
        step = self.unit // self.hash_tokens
        return block_hashes if step == 1 else block_hashes[step - 1 :: step]

    def registration(self, payload_bytes: Sequence[int]) -> list[tuple[str, int, int, int]]:
        """The parts as `_core.Engine.register` takes them; ``payload_bytes`` per group, all ranks together."""
        return [
            (part.kind, part.block_tokens, payload_bytes[part.group] if part.block_tokens else 0, part.window)
            for part in self.parts
        ]


def why_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why the connector must stay off for this model and deployment, for people; None if it need not."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            return f"{name} = {size} is not supported (only tensor parallelism is)"
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher" and parallel.world_size > 1:
        return "with external_launcher each rank has a scheduler of its own, whose saves hold one shard"
    if getattr(vllm_config, "lora_config", None) is not None and not compat.hashes_adapters():
        return "this vLLM's block hashes do not tell LoRA adapters apart in a way known here"
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    kinds = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        names = ", ".join(sorted({type(inner).__name__ for inner in compat.layer_specs(spec)}))
        kind = compat.group_kind(spec)
        kinds.append(kind)
        if kind == "ignored":
            continue
        if group.host_resident or not group.enable_kv_transfer:
            return f"KV cache group {index} ({names}) is not transferable"
        if kind is None:
            return (
                f"KV cache group {index} is {names}, which is not known here: what a hit needs of it cannot be told, "
                "and the other groups alone would give wrong output"
            )
        if kind == "state" and not compat.keeps_states(spec):
            return (
                f"KV cache group {index} ({names}) keeps no states at block boundaries; start vLLM with prefix caching "
                'and mamba_cache_mode "align"'
            )
    if all(kind == "ignored" for kind in kinds):
        return "no KV cache group of the model can be found again by its block hashes"
    return None
