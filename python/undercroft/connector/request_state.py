"""The state that the scheduler's half keeps of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft.connector.offers import BoundaryState
    from undercroft.request_params import LookupParams


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from its arrival (or first question) until it has finished."""

    request: Request
    lookup: LookupParams
    num_computed_tokens: int = 0
    """Tokens the device itself held when the scheduler last asked."""
    queued_behind: int = 0
    """Tokens of all prompts that came before (`Steps`)."""
    uncomputed: int = 0
    """Tokens of the prompt that are neither computed nor loaded."""
    shared_tokens: int = 0
    """Tokens of the prompt whose chain the last lookup found in the engine, whether a hit may end there or not."""
    asked_at: float | None = None
    """When the question that is still open was asked first (monotonic seconds); None when answered."""
    ran: bool = False
    """Whether a step has run it since the scheduler asked. Only then are its ``num_computed_tokens`` really on the
    device; before, a load (ours or another connector's) may still be in flight."""
    limit: int = 0
    """Deepest boundary of use to it, in tokens, when the question was opened."""
    min_tokens: int = 0
    """Tokens that must be cached for it to be served, by its hit threshold, when the question was opened."""
    unread_tokens: int = 0
    """Tokens beyond those of the device that a load could have brought, where they are too few to be read."""
    deferred: bool = False
    """Whether the open question was answered with "later" at least once."""
    timed_out: bool = False
    """Whether the open question is of a blocking lookup that reached its limit."""
    load_wait_since: float | None = None
    """When the open question first waited for another request's load (monotonic seconds); None if it did not."""
    counted_for: int = -1
    """Preemptions the request had had when its answer was last counted: it is asked for again and again."""
    lookup_failed: bool = False
    """A load failed or a lookup was given up: this request computes its prompt from now on."""
    saved_hashes: int = 0
    """The engine's blocks up to which saves have been asked for."""
    saved_tokens: int = 0
    """Tokens up to which slots were granted, or were not needed."""
    windows_kept: int = 0
    """Tokens up to which the windows before boundaries have been offered."""
    shared_boundary: int = 0
    """Tokens of a prefix that others share, beyond the part that can be loaded; 0 if there is none."""
    partial_tails: list[BoundaryState] = field(default_factory=list)
    """States that vLLM offered as the request ended."""
    tails: list[int] = field(default_factory=list)
    """Ends of the tails that are being looked up, the deepest first; a tail that was found is the only one left."""
    tails_asked: tuple[int, int] | None = None
    """The whole boundary and the limit that they were looked up for."""
    save_refused: bool = False
    """The last save left blocks out because memory was full: it is retried."""
    refusals: int = 0
    """Saves in a row that left blocks out."""
    retry_at: int = 0
    """The step from which on the save is retried."""
    epoch: int = 0
    """The cache reset after which the blocks on the device were computed."""
