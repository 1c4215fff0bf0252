"""Hits that end inside a block.

With ``prefix_match_unit`` finer than its blocks, vLLM caches a prompt's end inside a block too, and offers the state
there. Such a tail is kept as a chain of its own, of one block: the state, and the block of full attention that the end
lies in, under the hash at the end, which no chain of whole blocks has. A hit may go on from the last whole block that
can be had to the end of a tail in the block after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        """Where the deepest tail in the block after ``base`` ends; ``base`` without one, None while the disk owes it.

        What is found is kept from eviction until `drop`. That there is none is remembered.
        """
        self.begin(state, base)
        while state.tails:
            end = state.tails[0]
            answer = self._session.poll(
                tail_name(state.request.request_id, end),
                self._hashes(state.request, end),
                0,
                self._groups.unit,
                state.lookup.wait_ms,
            )
            if answer is None:
                return None
            self._keep(state, end, end if answer else 0)
            if answer:
                return end
        return base

    def wait(self, state: RequestState, base: int) -> int:
        """As `find`, but wait for the disk, woken by the answer; ``base`` if it is not there in time."""
        self._session.wait(tail_name(state.request.request_id, state.tails[0]), state.lookup.timeout_s)
        end = self.find(state, base)
        if end is None:
            self.drop(state)
            return base
        return end

    def drop(self, state: RequestState) -> None:
        """Nothing of it is needed any more. Idempotent."""
        for end in state.tails:
            self._session.finish(tail_name(state.request.request_id, end))
        state.tails = []
        state.tails_asked = None

    def _submit(self, state: RequestState, base: int, limit: int) -> None:
        request, groups = state.request, self._groups
        step = groups.tail_step
        last = min(limit, base + groups.unit - step, len(request.block_hashes) * groups.hash_tokens // step * step)
        state.tails = list(range(last, base, -step))[:_ENDS_MAX]
        for end in state.tails:
            name = tail_name(request.request_id, end)
            self._session.submit(name, self._hashes(request, end), 0, groups.unit, state.lookup.wait_ms)

    def _keep(self, state: RequestState, asked: int, found: int) -> None:
        """Let go of the lookup at ``asked``, or if that is ``found`` of all others."""
        for end in state.tails if found else [asked]:
            if end != found:
                self._session.finish(tail_name(state.request.request_id, end))
        state.tails = [found] if found else state.tails[1:]

    def _hashes(self, request: Request, end: int) -> list[bytes]:
        return [request.block_hashes[end // self._groups.hash_tokens - 1]]
