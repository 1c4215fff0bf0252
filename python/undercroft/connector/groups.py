"""The engine groups of a model's KV cache groups, and whether undercroft can serve the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from undercroft import compat
from undercroft.connector.stages import why_stages_are_unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_Hash = TypeVar("_Hash", bound=bytes)

ENGINE_GROUPS_MAX = 32
"""Most engine groups of a namespace."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """An engine group: one block of one of vLLM's KV cache groups in every hash block."""

    group: int
    kind: str
    window: int
    block_tokens: int
    """Tokens from the begin of one of this group's blocks to the next; 0 if the group is neither saved nor loaded."""
    per_block: int = 1
    """Blocks of the KV cache group in ``block_tokens``."""
    index: int = 0
    """Place of this engine group's block among the ``per_block`` blocks."""

    def position(self, block: int) -> int:
        """The position of the engine group's block ``block`` in the block table of the KV cache group."""
        return block * self.per_block + self.index

    def needed(self, boundary: int) -> range:
        """The blocks that a hit of ``boundary`` tokens needs; only for groups of which a hit needs some blocks."""
        end = boundary // self.block_tokens
        if self.kind == "sliding_window":
            return range(max(0, end - max(1, -(-(self.window - 1) // self.block_tokens))), end)
        if self.kind == "chunked_local":
            return range(boundary // self.window * self.window // self.block_tokens, end)
        return range(end - 1, end)


@dataclass(frozen=True, slots=True)
class GroupRegistration:
    """A group as `_core.Engine.register` takes it."""

    kind: str
    """The blocks that a hit needs: "full", "sliding_window", "chunked_local", "state" or "ignored"."""
    block_tokens: int
    """Tokens of one block; 0 if the group is ignored."""
    payload_bytes: int
    """Bytes of one block, all ranks together."""
    window_tokens: int
    """Tokens of the group's window or chunk; 0 if it has neither."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The sizes, in tokens, that lookups, loads and saves use."""

    hash_block_size: int
    """Tokens per block hash of vLLM."""
    alignment: int
    """Every hit is a multiple of this number of tokens."""
    kinds: tuple[str, ...]
    """Per group, the blocks that a hit needs; see `GroupRegistration.kind`."""
    block_tokens: tuple[int, ...]
    """Per group, tokens in a block; 0 for a group that is neither saved nor loaded."""
    windows: tuple[int, ...]
    """Per group, tokens of its window or chunk; 0 if it has neither."""
    dropped_tokens: int
    """Tokens by which a hit must end before the cached prefix does: a draft layer's KV depends on the token after."""
    lookahead_tokens: int = 0
    """Tokens after a block that its hash also covers."""
    engine_block_size: int = field(init=False)
    """Tokens of a hash block of the engine, a multiple of ``hash_block_size``. A block of every group ends with each
    hash block, so every node of the index has all that a restart needs to find its chain again."""
    engine_groups: tuple[EngineGroup, ...] = field(init=False)
    """The engine groups of all KV cache groups."""
    has_windows: bool = field(init=False)
    """Whether some group frees blocks that have left its window or chunk."""
    has_states: bool = field(init=False)
    """Whether some group holds states."""
    hits_whole_prompts: bool = field(init=False)
    """Whether a hit may end where the prompt ends. vLLM then computes the last token again, for its logits.

    This token needs the blocks before it, but a state or a window of the hit's end does not serve it: the state has
    taken the token in already, and the window may begin behind the first token that the last one attends to."""
    tail_step: int = field(init=False)
    """A hit may end inside a block at multiples of this number of tokens. 0 if no hit may, or if vLLM offers no state
    there."""

    def __post_init__(self) -> None:
        kinds = set(self.kinds)
        object.__setattr__(self, "has_windows", not kinds.isdisjoint({"sliding_window", "chunked_local"}))
        object.__setattr__(self, "has_states", "state" in kinds)
        object.__setattr__(self, "hits_whole_prompts", kinds == {"full"})
        size = math.lcm(self.hash_block_size, *(tokens for tokens in self.block_tokens if tokens))
        groups = tuple(self._split(size))
        if len(groups) > ENGINE_GROUPS_MAX:
            size, groups = self.hash_block_size, tuple(self._split(0))
        object.__setattr__(self, "engine_block_size", size)
        object.__setattr__(self, "engine_groups", groups)
        object.__setattr__(self, "tail_step", self.alignment if self._has_tails(size) else 0)
        object.__setattr__(self, "alignment", math.lcm(self.alignment, size))

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Groups:
        """Make the sizes from vLLM's configuration."""
        hash_block_size, alignment = compat.block_sizes(vllm_config, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        kinds = tuple(compat.group_kind(group.kv_cache_spec) or "ignored" for group in groups)
        block_tokens = tuple(
            0 if kind == "ignored" else group.kv_cache_spec.block_size
            for kind, group in zip(kinds, groups, strict=True)
        )
        lookahead = compat.hash_lookahead_tokens(vllm_config)
        drops = compat.drops_last_block(vllm_config) or any(group.is_eagle_group for group in groups)
        if drops:
            # A model with such a draft has no tails: its hits end with whole blocks.
            alignment = math.lcm(alignment, *(tokens for tokens in block_tokens if tokens))
        return cls(
            hash_block_size,
            alignment,
            kinds,
            block_tokens,
            tuple(compat.group_window(group.kv_cache_spec) for group in groups),
            alignment if drops and not lookahead else 0,
            lookahead,
        )

    def _has_tails(self, size: int) -> bool:
        alike = set(self.block_tokens) <= {0, size} and set(self.kinds) <= {"full", "state", "ignored"}
        finer = self.alignment < size and size % self.alignment == 0 == self.alignment % self.hash_block_size
        return alike and finer and self.has_states and not self.dropped_tokens

    def _split(self, size: int) -> list[EngineGroup]:
        """The engine groups for nodes of ``size`` tokens. With 0 each KV cache group is one engine group."""
        found = []
        for group, (kind, tokens, window) in enumerate(zip(self.kinds, self.block_tokens, self.windows, strict=True)):
            count = size // tokens if size and tokens else 1
            for index in range(count):
                # A block that ends `before` tokens ahead of its node's end leaves the window `before` tokens earlier.
                before = (count - 1 - index) * tokens
                if before and (kind == "state" or (kind == "sliding_window" and before >= window - 1)):
                    continue
                narrowed = window - before if kind == "sliding_window" else window
                found.append(EngineGroup(group, kind, narrowed, count * tokens, count, index))
        return found

    @property
    def loaded(self) -> tuple[int, ...]:
        """Indexes of the groups that a load fills."""
        return tuple(group for group, tokens in enumerate(self.block_tokens) if tokens)

    @property
    def window_blocks(self) -> int:
        """A load of at most this many blocks brings every block of each window. 0 if any load may leave out some."""
        if not set(self.kinds) <= {"full", "sliding_window", "ignored"}:
            return 0
        if not set(self.block_tokens) <= {0, self.engine_block_size}:
            return 0
        windows = (of_engine for of_engine in self.engine_groups if of_engine.kind == "sliding_window")
        return min((-(-(of_engine.window - 1) // of_engine.block_tokens) for of_engine in windows), default=0)

    def align(self, tokens: int) -> int:
        """``tokens`` rounded down to a boundary at which a hit may end."""
        return tokens // self.alignment * self.alignment

    def hashes(self, block_hashes: list[_Hash]) -> list[_Hash]:
        """The hashes of the engine's hash blocks; the list itself if each of vLLM's hash blocks is one."""
        if self.engine_block_size == self.hash_block_size:
            return block_hashes
        step = self.engine_block_size // self.hash_block_size
        return block_hashes[step - 1 :: step]

    def registration(self, payload_bytes: Sequence[int]) -> list[GroupRegistration]:
        """The groups as `_core.Engine.register` takes them; ``payload_bytes``: per KV cache group, of all ranks."""
        return [
            GroupRegistration(
                of_engine.kind,
                of_engine.block_tokens,
                payload_bytes[of_engine.group] if of_engine.block_tokens else 0,
                of_engine.window,
            )
            for of_engine in self.engine_groups
        ]


def why_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """The reason, for people, why the connector must stay off for this model and deployment; None if there is none."""
    return (
        _why_not_deployed_so(vllm_config)
        or why_prefixes_are_not_reusable(vllm_config, kv_cache_config)
        or _why_groups_are_unsupported(kv_cache_config)
        or why_stages_are_unsupported(vllm_config, kv_cache_config)
    )


def _why_not_deployed_so(vllm_config: VllmConfig) -> str | None:
    if device := _why_device_is_unsupported(vllm_config):
        return device
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            return f"{name} = {size} is not supported (only tensor and pipeline parallelism are)"
    if apart := why_ranks_are_apart(parallel):
        return apart
    if getattr(vllm_config, "lora_config", None) is not None and not compat.hashes_adapters():
        return "this vLLM's block hashes do not tell LoRA adapters apart in a way known here"
    if getattr(getattr(vllm_config, "speculative_config", None), "method", None) == "extract_hidden_states":
        # The workers may find this layer in a group whose spec, as the scheduler gets it, shows only the other layers.
        return "speculative decoding with extract_hidden_states: its layer of hidden states is not known here"
    aux_output = getattr(vllm_config, "aux_output_config", None)
    if getattr(aux_output, "enabled", False) and not compat.caps_external_hits():
        return "--enable-return-routed-experts: this vLLM fails on a hit whose routed experts it did not compute itself"
    return None


def why_ranks_are_apart(parallel_config: ParallelConfig) -> str | None:
    """The reason, for people, if the scheduler and all its ranks do not share one host memory; None if they do."""
    if parallel_config.world_size == 1:
        return None
    if getattr(parallel_config, "distributed_executor_backend", None) == "external_launcher":
        return "with external_launcher each rank has a scheduler of its own, whose saves hold one shard"
    if (hosts := compat.hosts(parallel_config)) > 1:
        return f"parallelism over {hosts} nodes: only one of them can reach the cache's memory"
    return None


def _why_device_is_unsupported(vllm_config: VllmConfig) -> str | None:
    kind = str(getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu"))
    if kind == "cuda" and compat.is_rocm():
        return "AMD GPUs (ROCm) are not supported: copies there have never been tried"
    if kind not in ("cpu", "cuda"):
        return f"devices of type {kind} are not supported: only NVIDIA GPUs and vLLM's CPU platform are"
    return None


def why_prefixes_are_not_reusable(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """The reason if vLLM itself reports that a prefix's KV depends on later tokens, or that its hash is ambiguous."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in compat.layer_specs(group.kv_cache_spec)]
    if any(getattr(spec, "non_causal", False) for spec in specs):
        return "the model has non-causal attention: the KV of a prefix depends on the tokens after it"
    model = vllm_config.model_config
    if getattr(model, "runner_type", None) == "pooling" and not getattr(model, "is_prefix_caching_supported", True):
        return "this kind of pooling needs the whole prompt computed at once, so no prefix can be loaded"
    if not vllm_config.cache_config.enable_prefix_caching:
        # Then vLLM may also name images by a counter that starts anew with each process.
        return (
            "vLLM's prefix caching is off, by --no-enable-prefix-caching or by vLLM itself for this model, so block "
            "hashes do not tell prefixes apart"
        )
    return None


def _why_groups_are_unsupported(kv_cache_config: KVCacheConfig) -> str | None:
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
                f"KV cache group {index} is {names}, which is not known here: the needs of a hit are unknown, "
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
