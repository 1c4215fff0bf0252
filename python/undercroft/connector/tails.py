"""Hits that end inside a block.

With ``prefix_match_unit`` finer than its blocks, vLLM also caches a prompt's end inside a block, and offers the state
there. Such a tail is stored as a chain of its own, of one block: the state, and the block of full attention that the
end lies in, keyed by the hash at the end, which no chain of whole blocks has. A hit may go on from the last whole block
that is cached to the end of a tail in the block after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft._core import Session
    from undercroft.connector.groups import Groups
    from undercroft.connector.request_state import RequestState

_ENDS_MAX = 128
"""Ends that are looked up for one request, the deepest first."""


def tail_name(request_id: str, end: int) -> str:
    """Name of the engine's request for the tail of a request that ends at ``end`` tokens."""
    return f"{request_id}\0{end}"


class Tails:
    """The lookups of tails."""

    def __init__(self, session: Session, groups: Groups) -> None:
        self._session = session
        self._groups = groups

    def limit(self, request: Request) -> int:
        """Where the deepest tail of use to a request ends, in tokens; 0 where the model has none."""
        step = self._groups.tail_step
        return (request.num_tokens - 1) // step * step if step else 0

    def begin(self, state: RequestState, base: int) -> None:
        """Start the lookups of the tails in the block after ``base``, and the reads from disk. Idempotent."""
        asked = base, self.limit(state.request)
        if self._groups.tail_step and state.tails_asked != asked:
            self.drop(state)
            state.tails_asked = asked
            self._submit(state, *asked)

    def find(self, state: RequestState, base: int) -> int | None:
        """Where the deepest tail in the block after ``base`` ends; ``base`` without one, None while it is pending.

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

    def wait(self, state: RequestState, base: int) -> int:
        """Find a hit as `find` does, but wait for the answer; ``base`` if it does not come in time."""
        self._session.wait(tail_name(state.request.request_id, state.tails[0]), state.lookup.timeout_s)
        end = self.find(state, base)
        if end is None:
            self.drop(state)
            return base
        return end

    def drop(self, state: RequestState) -> None:
        """End the lookups of a request's tails, and their leases. Idempotent."""
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
        """End the lookup at ``asked``; if a tail was ``found``, all lookups but its own."""
        for end in state.tails if found else [asked]:
            if end != found:
                self._session.finish_request(tail_name(state.request.request_id, end))
        state.tails = [found] if found else state.tails[1:]

    def _question(self, state: RequestState, end: int) -> tuple[Any, ...]:
        """The lookup of a tail."""
        block_hash = state.request.block_hashes[end // self._groups.hash_block_size - 1]
        name = tail_name(state.request.request_id, end)
        lookup = state.lookup
        return name, [block_hash], 0, self._groups.engine_block_size, lookup.wait_ms, 0, lookup.planned
