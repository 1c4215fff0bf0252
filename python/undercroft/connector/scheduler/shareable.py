"""The tokens of a request that may be cached: those whose KV the block hashes determine, for all time and hosts.

[docs/identity.md](../../../docs/identity.md) lists a request's inputs to the model, and where the key holds each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from undercroft import vllm_patches
from undercroft.connector.scheduler.offers import BoundaryState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.request import Request

    from undercroft.connector.groups import Groups

_CLAIMS_MAX = 1 << 16
"""Most names of media that are remembered as clients' names. Each vLLM's own caches of media hold fewer."""


class Shareable:
    """How much of each request may be looked up and saved."""

    def __init__(self, groups: Groups, *, unique_uuids: bool) -> None:
        """``unique_uuids``: the option ``unique_media_uuids``."""
        self._groups = groups
        self._unique_uuids = unique_uuids
        self._hashes_embeddings = vllm_patches.tell_embeddings_apart()
        self._claimed: dict[str, None] = {}
        """Names of media that clients gave. A client may give the name that vLLM gives to another client's picture, and
        vLLM's own caches of processed and encoded media then hold the wrong one under the picture's name."""

    def tokens(self, request: Request) -> int:
        """Number of the request's first tokens whose KV the block hashes determine."""
        if request.prompt_embeds is not None and not self._hashes_embeddings:
            return 0
        pooling = request.pooling_params
        if pooling is not None and (pooling.extra_kwargs or {}).keys() - {vllm_patches.MARK}:
            # Such as token types, which the model adds to the embeddings.
            return 0
        if request.mm_features and not self._unique_uuids and not self._named_by_content(request):
            first: int = request.mm_features[0].mm_position.offset
            return max(0, first - self._groups.lookahead_tokens)
        return int(request.num_tokens)

    def limit(self, request: Request) -> int:
        """The deepest boundary of whole blocks at which a hit of the request may end."""
        groups = self._groups
        tokens = request.num_tokens if groups.hits_whole_prompts else request.num_tokens - 1
        return groups.align(min(tokens, len(request.block_hashes) * groups.hash_block_size, self.tokens(request)))

    def states(self, request: Request, offered: Iterable[tuple[int, int, int]]) -> list[BoundaryState]:
        """The states that may be saved of those that vLLM offers, each as (group, device block, boundary)."""
        if not offered:
            return []
        most = self.tokens(request)
        return [state for state in (BoundaryState(*one) for one in offered) if state.boundary <= most]

    def _named_by_content(self, request: Request) -> bool:
        is_marked = vllm_patches.are_named_by_content(request)
        if is_marked and (request.resumable or not self._claimed):
            # The mark of a session with streaming input is that of its last turn. Its media are those of all turns.
            return not request.resumable
        media = request.mm_features
        names = {one.identifier for one in media} | {one.mm_hash for one in media if getattr(one, "mm_hash", None)}
        if is_marked:
            return self._claimed.keys().isdisjoint(names)
        self._claimed.update(dict.fromkeys(names))
        while len(self._claimed) > _CLAIMS_MAX:
            del self._claimed[next(iter(self._claimed))]
        return False
