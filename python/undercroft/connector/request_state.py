"""What the scheduler's half remembers of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft.request_params import LookupParams


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from its arrival (or first question) until it has finished."""

    request: Request
    lookup: LookupParams
    local_tokens: int = 0
    """Tokens the device itself held when the scheduler last asked."""
    asked_at: float | None = None
    """When the question that is still open was asked first (monotonic seconds); None when answered."""
    ran: bool = False
    """Whether a step has run it since the scheduler asked: what counts as computed of it is on the device then. Before,
    a load may be under way, also another connector's."""
    limit: int = 0
    """Deepest boundary of use to it, in tokens, when the question was opened."""
    deferred: bool = False
    """Whether the open question was answered with "later" at least once."""
    counted_for: int = -1
    """Preemptions the request had had when its answer was last counted: it is asked for again and again."""
    lookup_failed: bool = False
    """A load failed or a lookup was given up: this request computes its prompt from now on."""
    saved_hashes: int = 0
    """Units up to which saves have been asked for."""
    saved_tokens: int = 0
    """Tokens up to which slots were granted, or were not needed."""
    windows_kept: int = 0
    """Tokens up to which the windows before boundaries have been offered."""
    junction: int = 0
    """Tokens of a prefix that others share, beyond what can be loaded of it; 0 if there is none."""
    partial_tails: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, device block, boundary) of states that vLLM offered as the request ended."""
    tails: list[int] = field(default_factory=list)
    """Where the tails end that are being looked up, the deepest first; one that was found is the only one left."""
    tails_asked: tuple[int, int] | None = None
    """The whole boundary and the limit that they were looked up for."""
    save_refused: bool = False
    """The last save left blocks out for want of memory: worth asking again."""
    refusals: int = 0
    """How many saves in a row did."""
    retry_at: int = 0
    """The step from which on it is asked again."""
    epoch: int = 0
    """The cache reset after which the blocks on the device were computed."""
