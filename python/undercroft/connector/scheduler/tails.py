"""Hits that end inside a block.

If ``prefix_match_unit`` is smaller than a block, vLLM also caches a prompt's end inside a block, and offers the state
at this end. undercroft stores such a tail as a chain of one block: the state, and the block of full attention in which
the tail ends. The chain's key is the hash at the tail's end, which no chain of whole blocks has. A hit may extend from
the last whole cached block to the end of a tail in the next block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft._core import Session
    from undercroft.connector.groups import Groups
    from undercroft.connector.scheduler.request_state import RequestState
    from undercroft.connector.scheduler.shareable import Shareable

_ENDS_MAX = 128
"""Most ends that are looked up for one request, the deepest first."""


def tail_name(request_id: str, end: int) -> str:
    """Name of the engine's request for the tail of ``request_id`` that ends at ``end`` tokens."""
    return f"{request_id}\0{end}"


class Tails:
    """The lookups of tails."""

    def __init__(self, session: Session, groups: Groups, shareable: Shareable) -> None:
        self._session = session
        self._shareable = shareable
        self._groups = groups

    def limit(self, request: Request) -> int:
        """End of the deepest tail that a request can use, in tokens; 0 if the model has no tails."""
        if not (step := self._groups.tail_step):
            return 0
        tokens: int = min(request.num_tokens - 1, self._shareable.tokens(request))
        return tokens // step * step

    def begin(self, state: RequestState, base: int) -> None:
        """Start the lookups of the tails in the block after ``base``, and their reads from disk. Idempotent."""
        if not self._groups.tail_step:
            return
        asked = base, self.limit(state.request)
        if state.tails_asked != asked:
            self.drop(state)
            state.tails_asked = asked
            self._submit(state, *asked)

    def find(self, state: RequestState, base: int) -> int | None:
        """End of the deepest tail in the block after ``base``; ``base`` if there is no tail, None while it is pending.

        A tail that is found is leased until `drop`. A miss is cached.
        """
        self.begin(state, base)
        while state.tails:
            end = state.tails[0]
            answer = self._session.lookup(*self._question(state, end))
            if answer.pending:
                return None
            self._keep(state, end, end if answer.tokens else 0)
            if answer.tokens:
                return end
        return base

    def drop(self, state: RequestState) -> None:
        """End the lookups and leases of a request's tails. Idempotent."""
        for end in state.tails:
            self._session.finish_request(tail_name(state.request.request_id, end))
        state.tails = []
        state.tails_asked = None

    def _submit(self, state: RequestState, base: int, limit: int) -> None:
        request, groups = state.request, self._groups
        step = groups.tail_step
        hashed = len(request.block_hashes) * groups.hash_block_size // step * step
        last = min(limit, base + groups.engine_block_size - step, hashed)
        state.tails = list(range(last, base, -step))[:_ENDS_MAX]
        for end in state.tails:
            self._session.prefetch(*self._question(state, end))

    def _keep(self, state: RequestState, asked: int, found: int) -> None:
        """End the lookup of the tail at ``asked``. If a tail was ``found``, end all other lookups."""
        for end in state.tails if found else [asked]:
            if end != found:
                self._session.finish_request(tail_name(state.request.request_id, end))
        state.tails = [found] if found else state.tails[1:]

    def _question(self, state: RequestState, end: int) -> tuple[Any, ...]:
        """The arguments of the session's lookup of a tail."""
        block_hash = state.request.block_hashes[end // self._groups.hash_block_size - 1]
        name = tail_name(state.request.request_id, end)
        lookup = state.lookup
        return name, [block_hash], 0, self._groups.engine_block_size, lookup.wait_ms, 0, lookup.planned
