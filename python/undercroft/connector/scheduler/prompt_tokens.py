"""Counts the prompt tokens of each request by source, or by the reason of the miss, when the request first runs.

``asked_tokens`` is the sum of ``device_tokens``, ``hit_tokens`` and ``missed_tokens``: each of a prompt's tokens counts
in exactly one of these. A request that is aborted or rejected before it runs counts nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from undercroft.reasons import NOT_LOOKED_UP, NOT_TAKEN, OTHER_CONNECTOR, PROMPT_END

if TYPE_CHECKING:
    from collections.abc import Mapping

    from undercroft._core import Session
    from undercroft.connector.groups import Groups
    from undercroft.connector.observe.stats import Counts
    from undercroft.connector.scheduler.loads import LoadPlan
    from undercroft.connector.scheduler.request_state import RequestState


@dataclass(slots=True)
class _Prompt:
    state: RequestState
    reason: str
    """Why the lookup found no more tokens."""
    load: LoadPlan | None = None
    """The load that has brought tokens."""


class PromptTokens:
    """The prompts of one vLLM scheduler."""

    def __init__(self, session: Session, groups: Groups, counts: Counts) -> None:
        self._session = session
        self._groups = groups
        self._counts = counts
        self.has_siblings = False
        """Whether other connectors may bring tokens."""
        self.waiting: dict[str, _Prompt] = {}
        """Requests that have device blocks and have not run yet: they wait for a load, or for this step's end."""

    def admitted(self, state: RequestState) -> None:
        """A request got its device blocks, for a load or to run. Call this before its lookup ends."""
        request = state.request
        known = self.waiting.get(request.request_id)
        if state.is_counted or (known is not None and known.load is not None):
            return
        if state.lookup_failed:
            reason = "timed_out" if state.question.timed_out else "load_failed"
        else:
            rest = self._session.rest(request.request_id)
            # The whole lookup may have been a hit of which vLLM takes only a part.
            reason = NOT_TAKEN if rest is None or rest[0] == "complete" else rest[0]
        self.waiting[request.request_id] = _Prompt(state, reason)

    def loaded(self, request_id: str, plan: LoadPlan) -> None:
        """The load of a request has ended well."""
        if (prompt := self.waiting.get(request_id)) is not None:
            prompt.load = plan

    def gone(self, request_id: str) -> None:
        """A request has ended."""
        self.waiting.pop(request_id, None)

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """A step was scheduled. ``tokens``: the number of tokens that the step computes, by request."""
        for request_id in self.waiting.keys() & tokens.keys():
            self._count(self.waiting.pop(request_id))

    def _count(self, prompt: _Prompt) -> None:
        state = prompt.state
        state.is_counted = True
        tokens = state.request.num_prompt_tokens
        cached = min(state.request.num_computed_tokens, tokens)
        # The device had these when the scheduler asked. Without a load it may have had a part of a block more.
        is_all_local = prompt.load is None and not self.has_siblings
        device = cached if is_all_local else min(cached, state.num_computed_tokens)
        # vLLM may compute the last token of a load again.
        loaded = cached - device if prompt.load else 0
        tokens_by_tier = prompt.load.tokens if prompt.load else {}
        remote = min(tokens_by_tier.get("remote", 0), loaded)
        disk = min(tokens_by_tier.get("disk", 0), loaded - remote)
        most = tokens if self._groups.hits_whole_prompts else tokens - 1
        end = min(tokens - 1, most - most % self._groups.alignment)
        found = max(cached, min(state.question.limit, end))
        end = max(found, end)
        # In one call, since this is in the way of a step.
        self._counts.add_all(
            (
                ("asked_tokens", tokens),
                ("device_tokens", device),
                ("hit_tokens_host", loaded - disk - remote),
                ("hit_tokens_disk", disk),
                ("hit_tokens_remote", remote),
                (f"missed_tokens_{OTHER_CONNECTOR}", cached - device - loaded),
                (f"missed_tokens_{prompt.reason}", found - cached),
                (f"missed_tokens_{NOT_LOOKED_UP}", end - found),
                (f"missed_tokens_{PROMPT_END}", tokens - end),
            )
        )
