"""The lookups of prompts: one question to the engine for a prompt and step, whatever number of keys vLLM asks for."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult

from undercroft import compat, request_params
from undercroft.connector.scheduler.steps import Steps
from undercroft.request_params import LookupParams

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.request import Request

    from undercroft.config import UndercroftConfig
    from undercroft.connector.scheduler.shareable import Shareable
    from undercroft.embed import Cache
    from undercroft.vllm_tier.chunks import Chunks, Place

_TRIES_MAX = 3
"""Most questions about a prompt after loads that brought less than their lookups had found."""
_CROWDED_MAX_S = 1.0
"""Longest wait for room in vLLM's host memory. Afterwards the hit ends with the chunks that found room."""
_WAIT_MAX_S = 60.0
"""Longest time for which vLLM is told to ask again, as in undercroft's connector."""
_WALK_S = 0.05
"""Time after which vLLM asks for each chunk of a waiting prompt again: its host memory may have them meanwhile."""
_ASK_S = 0.0005
"""Time after which the engine is asked about a waiting prompt again."""
_FINAL = frozenset(
    (
        *("complete", "never_seen", "not_admitted", "evicted_host", "evicted_disk"),
        *("lost", "incomplete", "other_identity", "no_boundary"),
    )
)
"""Reasons of an answer for which a load of its hit leaves nothing more to find."""
_BEYOND = 1 << 62
"""More tokens than any prompt has."""
_MOST = 1 << 30
"""As many tokens as no hit has: a lookup that needs so many reads nothing."""


@dataclass(slots=True, eq=False)
class Hit:
    """The tokens that a question to the engine is about, and its answer."""

    begin: int = 0
    """Tokens before the first block."""
    limit: int = 0
    """Where the hit ends at the latest, in tokens."""
    end: int = 0
    """Where it ends, in tokens."""
    reach: int = _BEYOND
    """It begins at so many tokens at the latest: vLLM's host memory has full attention behind them, and lacks chunks
    that end a hit. Until the prompt runs."""


@dataclass(slots=True, eq=False)
class Waits:
    """For how long a prompt has been asked about: times are seconds of a monotonic clock."""

    ask_at: float = 0.0
    """Time at which the engine may be asked again."""
    walked_at: float = 0.0
    """Time at which vLLM last asked for the prompt's chunks."""
    asked_at: float | None = None
    """Time at which vLLM asked first since the prompt last ran."""
    crowded_at: float | None = None
    """Time since which vLLM's host memory has had no room for the prompt's chunks."""
    tries: int = 0
    """Loads that brought less than their lookups had found."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A request as the tier knows it, from its arrival until it has finished."""

    request: Request
    lookup: LookupParams
    context: ReqContext | None = None
    """vLLM's own notes about the request, among them where each chunk ends."""
    queued_behind: int = 0
    """See `Steps`."""
    uncomputed: int = 0
    computed: int = 0
    """Tokens that the device holds, as vLLM last asked."""
    step: int = -1
    """The step in which the engine was last asked."""
    hit: Hit = field(default_factory=Hit)
    """The hit that was found last."""
    is_pending: bool = False
    """Whether the engine has not answered yet."""
    is_held: bool = False
    """Whether the blocks of the hit are kept in memory, for a load."""
    served: dict[bytes, Place] = field(default_factory=dict)
    """The chunks of a hit that is held, by vLLM's keys."""
    has_room: bool = False
    """Whether vLLM's host memory had room for all of them in this step."""
    known_end: int = _BEYOND
    """After so many tokens there are no blocks, as the last hit's answer said; until the prompt runs."""
    waits: Waits = field(default_factory=Waits)
    landed: int = 0
    """Chunks that loads have brought into vLLM's host memory since the prompt last ran."""


class Prompts:
    """The prompts of one vLLM."""

    def __init__(
        self, cache: Cache, chunks: Chunks, shareable: Shareable, config: UndercroftConfig, most_tokens: int
    ) -> None:
        """``most_tokens``: tokens of the longest hit that vLLM's host memory holds."""
        self._cache, self._chunks, self._groups = cache, chunks, chunks.groups
        self._shareable, self._config = shareable, config
        self._most_tokens = most_tokens
        self.steps = Steps(cache.session)
        self._lookup = request_params.of_request(None, config)
        self.known: dict[str, Prompt] = {}
        """The requests that have not finished, by name."""
        self.step = 0
        """Number of passes of the scheduler."""
        self.host: Any = None
        """See `compat.host_tier`."""
        self.landed = 0
        """Chunks in vLLM's host memory that wait for their prompts to run. Other chunks must not take their room."""

    def add(self, request: Request) -> Prompt:
        """A request has arrived."""
        lookup = self._lookup
        if request.kv_transfer_params:
            with contextlib.suppress(request_params.InvalidParameterError):
                lookup = request_params.of_request(request.kv_transfer_params, self._config)
        prompt = self.known[request.request_id] = Prompt(request, lookup)
        self.steps.arrived(prompt)
        return prompt

    def prefetch(self, prompt: Prompt, computed: int, context: ReqContext) -> None:
        """Start the reads of a prompt that has arrived, of which the device has ``computed`` tokens."""
        request, limit = prompt.request, self._shareable.limit(prompt.request)
        if not self._config.early_prefetch or request.resumable or request.skip_reading_prefix_cache:
            return
        if limit <= computed or request_params.is_brought(request.kv_transfer_params):
            return
        begin = computed
        for key, end in self._chunks.keys_of_prefix(request.block_hashes, computed) if self.host is not None else ():
            if self.host.lookup(key, context) is LookupResult.MISS:
                break
            begin = end
        if limit <= begin:
            return
        lookup = prompt.lookup
        self._cache.session.prefetch(
            request.request_id,
            self.chain(prompt),
            begin,
            limit,
            lookup.wait_ms,
            0,
            lookup.planned,
            self.steps.queued(prompt),
        )

    def chain(self, prompt: Prompt) -> list[bytes]:
        """The hashes of the engine's blocks, as far as the prompt has them now."""
        return self._groups.hashes(prompt.request.block_hashes)

    def is_later(self, prompt: Prompt) -> bool:
        """Whether the answer to each question of vLLM about a prompt's chunks is still "later", as it was before."""
        now, waits = time.monotonic(), prompt.waits
        if not prompt.is_pending or now - waits.walked_at > _WALK_S:
            return False
        # Without anything to compute, vLLM's steps follow each other at once.
        if prompt.step != self.step and now >= waits.ask_at:
            prompt.step, waits.ask_at = self.step, now + _ASK_S
            self._ask(prompt)
        return prompt.is_pending

    def look(self, prompt: Prompt, place: Place) -> None:
        """Let the prompt have its answer for this step. ``place``: the first chunk that vLLM lacks."""
        prompt.step = self.step
        hit, waits = prompt.hit, prompt.waits
        now = waits.walked_at = time.monotonic()
        if waits.asked_at is None:
            waits.asked_at = now
        late = now - waits.asked_at > _WAIT_MAX_S or waits.tries > _TRIES_MAX
        # A longer hit would evict its own beginning from vLLM's host memory.
        most = self._groups.align(prompt.computed) + self._most_tokens
        hit.limit = min(self._shareable.limit(prompt.request), most)
        begin = self._begin(prompt, place)
        if prompt.is_held and hit.begin <= begin and not late:
            prompt.has_room = self.finds_room(len(prompt.served))
            return
        hit.begin = begin
        if late or hit.limit <= hit.begin:
            self.drop(prompt)
        else:
            self._ask(prompt)

    def _begin(self, prompt: Prompt, place: Place) -> int:
        """The tokens before the first block that is to be loaded."""
        group = self._chunks.engine_groups[place.engine_group]
        begin = max(prompt.computed, place.end - group.block_tokens) if group.kind == "full" else prompt.computed
        if (reach := prompt.hit.reach) < _BEYOND:
            begin = min(begin, reach) if group.kind == "full" else reach
        return self._floor(begin)

    def _floor(self, tokens: int) -> int:
        return tokens // self._groups.engine_block_size * self._groups.engine_block_size

    def reaches_back(self, prompt: Prompt, place: Place) -> bool:
        """vLLM lacks a chunk that is not in the answer of this step. Whether a later answer may have it.

        vLLM's host memory may have the beginning of a prompt for another prompt, whose hit ends elsewhere, and not the
        chunks of windows and states that a hit of this prompt needs at its end.
        """
        group, hit = self._chunks.engine_groups[place.engine_group], prompt.hit
        if group.kind == "full" or place.end > hit.begin:
            return False
        if prompt.is_held:
            end, reach = hit.end, max(prompt.computed, self._chunks.first_at_end(hit.end))
        else:
            # A hit may end in what vLLM has. All of it counts for the plan, so the reads have all, too.
            if prompt.known_end > hit.begin:
                prompt.known_end = self._deepest(prompt, hit.begin)
            end, reach = prompt.known_end, prompt.computed
        if place.number not in group.needed(end):
            return False
        hit.reach = min(hit.reach, reach)
        # vLLM may ask for a chunk several times in a step.
        return self._floor(hit.reach) < hit.begin

    def _deepest(self, prompt: Prompt, limit: int) -> int:
        """Where the deepest hit may end at ``limit`` tokens at the latest, as far as the index knows. Reads nothing."""
        # The engine asks a remote store for no prompt whose name goes on behind a zero.
        name = f"{prompt.request.request_id}\0"
        found = self._cache.session.lookup(name, self.chain(prompt), 0, limit, None, _MOST)
        self._cache.forget(name)
        return 0 if found.pending else found.shared_tokens

    def _ask(self, prompt: Prompt) -> None:
        """Ask the engine."""
        hit, lookup, name = prompt.hit, prompt.lookup, prompt.request.request_id
        found = self._cache.session.lookup(
            name,
            self.chain(prompt),
            hit.begin,
            hit.limit,
            lookup.wait_ms,
            0,
            lookup.planned,
            self.steps.queued(prompt),
        )
        prompt.is_pending = found.pending
        if found.pending:
            return
        hit.end, prompt.served = found.tokens, {}
        prompt.is_held = found.tokens > hit.begin
        if prompt.is_held and prompt.context is not None:
            prompt.served = self._chunks.served(prompt.context, prompt.request.block_hashes, hit.begin, hit.end)
            prompt.has_room = self.finds_room(len(prompt.served))
            rest = self._cache.session.rest(name)
            prompt.known_end = hit.end if rest is not None and rest[0] in _FINAL else _BEYOND

    def finds_room(self, chunks: int) -> bool:
        """Whether vLLM's host memory has room for chunks without those that wait for their prompts."""
        return self.host is None or compat.free_chunks(self.host, self.landed) >= chunks

    @staticmethod
    def may_wait(prompt: Prompt) -> bool:
        """vLLM's host memory has no room for a chunk. Whether to wait for some."""
        now, waits = time.monotonic(), prompt.waits
        if waits.crowded_at is None:
            waits.crowded_at = now
        return now - waits.crowded_at < _CROWDED_MAX_S

    def loads(self, prompt: Prompt) -> None:
        """A load takes over the blocks of the hit."""
        prompt.is_held, prompt.served = False, {}

    def has_loaded(self, prompt: Prompt, count: int, *, whole: bool) -> None:
        """A load has ended and has brought ``count`` chunks."""
        prompt.waits.tries += not whole
        if self.known.get(prompt.request.request_id) is prompt:
            prompt.landed += count
            self.landed += count

    def drop(self, prompt: Prompt) -> None:
        """Keep no blocks for a prompt any more: it runs, or nothing more is wanted."""
        self._cache.session.end_lookup(prompt.request.request_id)
        prompt.is_held = prompt.is_pending = False
        prompt.hit.end, prompt.served = 0, {}

    def _leave(self, prompt: Prompt) -> None:
        """The chunks that have landed for a prompt are in use, or not wanted any more."""
        self.landed -= prompt.landed
        prompt.landed = 0

    def runs(self, request_id: str) -> None:
        """A step runs a request, or has preempted it: its next lookup is another one."""
        prompt = self.known.get(request_id)
        if prompt is not None and prompt.waits.asked_at is not None:
            self.drop(prompt)
            self._leave(prompt)
            waits = prompt.waits
            waits.asked_at, waits.crowded_at, waits.tries = None, None, 0
            prompt.known_end = prompt.hit.reach = _BEYOND

    def finished(self, request_id: str) -> None:
        """A request has finished, and all its loads and saves have begun."""
        prompt = self.known.pop(request_id, None)
        if prompt is not None:
            self._leave(prompt)
            self.steps.gone(prompt)
        self._cache.forget(request_id)

    def step_ends(self) -> None:
        """The scheduler's pass has ended: pending answers are asked for again in a later one (`is_later`)."""
        self.step += 1

    def forget_all(self) -> None:
        """A reset: no hit that was found is valid any more."""
        for prompt in self.known.values():
            self.drop(prompt)
            self._leave(prompt)
            prompt.known_end = prompt.hit.reach = _BEYOND
