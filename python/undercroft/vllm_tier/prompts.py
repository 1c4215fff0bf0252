"""The lookups of prompts: one question to the engine for a prompt and step, whatever number of keys vLLM asks for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from undercroft import request_params
from undercroft.connector.scheduler.steps import Steps
from undercroft.request_params import LookupParams

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft.config import UndercroftConfig
    from undercroft.connector.groups import Groups
    from undercroft.connector.scheduler.shareable import Shareable
    from undercroft.embed import Cache

_TRIES_MAX = 3
"""Most questions about a prompt after loads that brought less than their lookups had found."""
_CROWDED_MAX_S = 1.0
"""Longest wait for room in vLLM's host memory. Afterwards the hit ends with the chunks that found room."""
_WAIT_MAX_S = 60.0
"""Longest time for which vLLM is told to ask again, as in undercroft's connector."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A request as the tier knows it, from its arrival until it has finished."""

    request: Request
    lookup: LookupParams
    queued_behind: int = 0
    """See `Steps`."""
    uncomputed: int = 0
    computed: int = 0
    """Tokens that the device holds, as vLLM last asked."""
    step: int = -1
    """The step in which the engine was last asked."""
    begin: int = 0
    """Tokens before the first block of the hit that was found last."""
    hit: int = 0
    """End of that hit, in tokens."""
    is_pending: bool = False
    """Whether the engine has not answered yet."""
    is_held: bool = False
    """Whether the blocks of the hit are kept in memory, for a load."""
    tries: int = 0
    asked_at: float | None = None
    """Time at which vLLM asked first (seconds of a monotonic clock) since the prompt last ran."""
    crowded_at: float | None = None
    """Time since which vLLM's host memory has had no room for the prompt's chunks."""
    landed: int = 0
    """Chunks that loads have brought into vLLM's host memory since the prompt last ran."""


class Prompts:
    """The prompts of one vLLM."""

    def __init__(
        self, cache: Cache, groups: Groups, shareable: Shareable, config: UndercroftConfig, most_tokens: int
    ) -> None:
        """``most_tokens``: tokens of the longest hit that vLLM's host memory holds."""
        self._cache, self._groups, self._shareable, self._config = cache, groups, shareable, config
        self._most_tokens = most_tokens
        self.steps = Steps(cache.session)
        self._known: dict[str, Prompt] = {}
        self._step = 0
        self.landed = 0
        """Chunks in vLLM's host memory that wait for their prompts to run. Other chunks must not take their room."""

    def add(self, request: Request) -> Prompt:
        """A request has arrived."""
        try:
            lookup = request_params.of_request(request.kv_transfer_params, self._config)
        except request_params.InvalidParameterError:
            lookup = request_params.of_request(None, self._config)
        prompt = self._known[request.request_id] = Prompt(request, lookup)
        self.steps.arrived(prompt)
        return prompt

    def get(self, request_id: str) -> Prompt | None:
        """The prompt of a request that has not finished."""
        return self._known.get(request_id)

    def prefetch(self, prompt: Prompt, computed: int) -> None:
        """Start the reads of a prompt that has arrived."""
        request, limit = prompt.request, self._shareable.limit(prompt.request)
        if not self._config.early_prefetch or request.resumable or request.skip_reading_prefix_cache:
            return
        if limit <= computed or request_params.is_brought(request.kv_transfer_params):
            return
        lookup = prompt.lookup
        self._cache.session.prefetch(
            request.request_id,
            self.chain(prompt),
            computed,
            limit,
            lookup.wait_ms,
            0,
            lookup.planned,
            self.steps.queued(prompt),
        )

    def chain(self, prompt: Prompt) -> list[bytes]:
        """The hashes of the engine's blocks, as far as the prompt has them now."""
        return self._groups.hashes(prompt.request.block_hashes)

    def look(self, prompt: Prompt, begin: int) -> None:
        """Let the prompt have its answer for this step. ``begin``: tokens before the first chunk that vLLM lacks."""
        if prompt.step == self._step:
            return
        prompt.step = self._step
        now = time.monotonic()
        if prompt.asked_at is None:
            prompt.asked_at = now
        late = now - prompt.asked_at > _WAIT_MAX_S or prompt.tries > _TRIES_MAX
        if prompt.is_held and not late:
            return
        prompt.begin = begin // self._groups.engine_block_size * self._groups.engine_block_size
        # A longer hit would evict its own beginning from vLLM's host memory.
        limit = min(self._shareable.limit(prompt.request), self._groups.align(prompt.computed) + self._most_tokens)
        if late or limit <= prompt.begin:
            self.drop(prompt)
            return
        lookup = prompt.lookup
        found = self._cache.session.lookup(
            prompt.request.request_id,
            self.chain(prompt),
            prompt.begin,
            limit,
            lookup.wait_ms,
            0,
            lookup.planned,
            self.steps.queued(prompt),
        )
        prompt.is_pending = found.pending
        prompt.hit = found.tokens
        prompt.is_held = not found.pending and found.tokens > prompt.begin

    @staticmethod
    def may_wait(prompt: Prompt) -> bool:
        """vLLM's host memory has no room for a chunk. Whether to wait for some."""
        now = time.monotonic()
        if prompt.crowded_at is None:
            prompt.crowded_at = now
        return now - prompt.crowded_at < _CROWDED_MAX_S

    def loads(self, prompt: Prompt) -> None:
        """A load takes over the blocks of the hit."""
        prompt.is_held = False

    def has_loaded(self, prompt: Prompt, count: int, *, whole: bool) -> None:
        """A load has ended and has brought ``count`` chunks."""
        prompt.tries += not whole
        if self._known.get(prompt.request.request_id) is prompt:
            prompt.landed += count
            self.landed += count

    def drop(self, prompt: Prompt) -> None:
        """Keep no blocks for a prompt any more: it runs, or nothing more is wanted."""
        self._cache.session.end_lookup(prompt.request.request_id)
        prompt.is_held = prompt.is_pending = False
        prompt.hit = 0

    def _leave(self, prompt: Prompt) -> None:
        """The chunks that have landed for a prompt are in use, or not wanted any more."""
        self.landed -= prompt.landed
        prompt.landed = 0

    def runs(self, request_id: str) -> None:
        """A step runs a request, or has preempted it: its next lookup is another one."""
        prompt = self._known.get(request_id)
        if prompt is not None and prompt.asked_at is not None:
            self.drop(prompt)
            self._leave(prompt)
            prompt.asked_at, prompt.crowded_at, prompt.tries = None, None, 0

    def finished(self, request_id: str) -> None:
        """A request has finished, and all its loads and saves have begun."""
        prompt = self._known.pop(request_id, None)
        if prompt is not None:
            self._leave(prompt)
            self.steps.gone(prompt)
        self._cache.forget(request_id)

    def step_ends(self) -> None:
        """The scheduler's pass has ended: pending answers are asked for again in the next one."""
        self._step += 1

    def forget_all(self) -> None:
        """A reset: no hit that was found is valid any more."""
        for prompt in self._known.values():
            self.drop(prompt)
            self._leave(prompt)
