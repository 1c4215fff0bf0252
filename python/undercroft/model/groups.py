"""The sizes of the KV cache groups that vLLM makes of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undercroft.model.layers import Layer

BLOCK_TOKENS = 16
"""vLLM's default on GPUs."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A KV cache group: the fields of `undercroft.connector.groups.GroupRegistration`, and more."""

    kind: str
    block_tokens: int
    payload_bytes: int
    """Bytes of one block, all ranks together."""
    window_tokens: int
    layers: int


def groups_of(layers: Sequence[Layer], block_tokens: int, ranks: int = 1) -> list[KVGroup]:
    """The groups in vLLM's order. All have blocks of the same number of tokens.

    A group has as many layers as the kind of layers with the fewest. If the kind with the most layers has less than
    half as many again, a group has as many layers as this kind (vLLM's ``_get_kv_cache_groups_uniform_page_size``).
    """
    block = _block_tokens(layers, block_tokens, ranks)
    kinds: dict[Layer, int] = {}
    for layer in layers:
        kinds[layer] = kinds.get(layer, 0) + 1
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < fewest * 1.5 else fewest
    found = []
    for layer, count in kinds.items():
        parts = -(-count // size)
        for part in range(parts):
            members = len(range(part, count, parts))
            page = layer.state_bytes or layer.token_bytes * block
            found.append(KVGroup(layer.kind, block, members * page, layer.window, members))
    return found


def _block_tokens(layers: Sequence[Layer], block_tokens: int, ranks: int) -> int:
    """Tokens of a block. For a model with states, vLLM enlarges blocks until an attention page is as large as a state
    page."""
    state = max((layer.state_bytes for layer in layers), default=0) // ranks
    token = max((layer.token_bytes for layer in layers), default=0) // ranks
    if not state or not token:
        return block_tokens
    return max(1, -(-state // (block_tokens * token))) * block_tokens
