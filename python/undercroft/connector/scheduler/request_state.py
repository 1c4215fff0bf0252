"""The state of each request that the scheduler's half keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft._core import Lookup
    from undercroft.connector.scheduler.offers import BoundaryState
    from undercroft.request_params import LookupParams


@dataclass(slots=True, eq=False)
class Question:
    """What the scheduler asks about a request, and the last answer (`Lookups`)."""

    asked_at: float | None = None
    """Time of the open question's first call (seconds of a monotonic clock); None if no question is open."""
    limit: int = 0
    """Deepest boundary that a hit of the request could use, in tokens, when the question was first asked."""
    min_tokens: int = 0
    """Tokens that must be cached by the request's hit threshold, when the question was first asked."""
    shared_tokens: int = 0
    """Shared tokens of the prompt, as the last lookup found them: their chain is in the index, usable or not."""
    unread_tokens: int = 0
    """Tokens that the tiers hold beyond the device's, and that were not read because too few are cached in all."""
    deferred: bool = False
    """Whether the open question was answered with "later" at least once."""
    timed_out: bool = False
    """Whether the open question is a blocking lookup that reached ``lookup_timeout_ms``."""
    waits_until: float | None = None
    """Deadline of the open question's blocking lookup (seconds of a monotonic clock); None if it has not waited."""
    load_wait_since: float | None = None
    """Time at which the open question first waited for another request's load (seconds of a monotonic clock); None if
    it has not waited."""
    waits_for_load: bool = False
    """Whether the open question was last answered and waits for another request's load only."""
    found: tuple[int, Lookup] | None = None
    """The answer that vLLM's next question gets, with the tokens from which it counts."""
    counted_for: int = -1
    """The request's number of preemptions when its answer was last counted: each preemption's answer counts once."""

    def counts(self, request: Request) -> bool:
        """Whether the answer to the request is to be counted: the first one, and the first after each preemption."""
        before, self.counted_for = self.counted_for, int(request.num_preemptions)
        return before != self.counted_for

    def outcome(self, computed: int, gain: int) -> str:
        """The outcome as which an answered lookup is counted. ``computed``: the tokens on the device. ``gain``: the
        tokens that can be loaded."""
        if self.timed_out:
            return "timed_out"
        if gain:
            return "disk" if self.deferred else "host"
        return "on_device" if 0 < min(self.shared_tokens, self.limit) <= computed else "miss"


@dataclass(slots=True, eq=False)
class Saving:
    """How far the blocks of a request are saved, and what its next save has to know (`DueSaves`)."""

    saved_hashes: int = 0
    """Number of the engine's blocks for which slots have been requested."""
    saved_tokens: int = 0
    """Number of tokens whose blocks got slots, or needed none."""
    settled: range = range(0)
    """Numbers of computed tokens with which every complete block has been offered to the tiers, so no save is due.
    Empty while a save is refused."""
    windows_kept: int = 0
    """Number of tokens up to which the windows before boundaries have been saved."""
    shared_boundary: int = 0
    """End of a prefix that other prompts share, in tokens, if it is deeper than the hit; else 0."""
    partial_tails: list[BoundaryState] = field(default_factory=list)
    """States that vLLM offered when the request ended."""
    refused: bool = False
    """Whether the last save left blocks out because memory was full. Such a save is retried."""
    refusals: int = 0
    """Successive saves that left blocks out."""
    retry_at: int = 0
    """First step in which the save may be retried."""
    epoch: int = 0
    """Number of the last cache reset before the blocks on the device were computed."""

    def settle(self, num_hashes: int, block_size: int, computed_tokens: int, provisional_tokens: int) -> None:
        """All of ``num_hashes`` complete blocks have been offered to the tiers. Nothing is settled if anything but
        ``computed_tokens`` limits their number: hashes that appear late, for instance."""
        first = num_hashes * block_size + provisional_tokens
        settled = range(first, first + block_size)
        self.settled = settled if computed_tokens in settled else range(0)

    def save_again(self) -> None:
        """Offer all blocks to the tiers again."""
        self.saved_hashes = self.saved_tokens = self.windows_kept = 0
        self.settled = range(0)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from its arrival (or first question) until it has finished."""

    request: Request
    lookup: LookupParams
    num_computed_tokens: int = 0
    """Tokens on the device when the scheduler last asked."""
    queued_behind: int = 0
    """Tokens of all prompts that arrived before this request (`Steps`)."""
    uncomputed: int = 0
    """Tokens of the prompt that are neither computed nor loaded."""
    ran: bool = False
    """Whether a step has run the request since the scheduler asked. Before that step its ``num_computed_tokens`` may
    not be on the device: a load of undercroft or of another connector may still be in flight."""
    lookup_failed: bool = False
    """Whether a load failed or a lookup was given up: from then on the request computes its prompt."""
    is_loaded: bool = False
    """Whether a load of the request has ended and the scheduler has not asked since."""
    is_counted: bool = False
    """Whether the tokens of its prompt are counted (`PromptTokens`)."""
    lost_blocks: bool = False
    """Whether the request has lost its device blocks, by a failed load or a reset, and the scheduler has not asked
    since. The next answer is "later": vLLM then takes the request out of the queue of requests that hold blocks. In
    this queue it could wait for ever for the blocks of the requests behind it."""
    tails: list[int] = field(default_factory=list)
    """Ends of the tails with a lookup, the deepest first. After a hit, only the end of the tail that was found."""
    tails_asked: tuple[int, int] | None = None
    """The boundary of whole blocks and the limit for which `tails` were looked up."""
    question: Question = field(default_factory=Question)
    saving: Saving = field(default_factory=Saving)

    def ask(self, num_computed_tokens: int, epoch: int) -> bool:
        """The scheduler asks. Returns whether the request has lost its device blocks since the last question."""
        question, saving = self.question, self.saving
        self.num_computed_tokens = num_computed_tokens
        # These blocks were offered to the tiers when they were computed. If the tiers want one of them again, the save
        # is refused, and retried with all blocks.
        saving.saved_tokens = num_computed_tokens
        saving.epoch = epoch
        self.ran = self.is_loaded = question.waits_for_load = False
        question.unread_tokens = 0
        lost, self.lost_blocks = self.lost_blocks, False
        return lost

    def is_read_below(self, tokens: int) -> bool:
        """Whether a question from fewer tokens than these waits for reads or checks. A lookup from other tokens would
        begin both anew, and the next question would begin the other's: neither would end."""
        question = self.question
        return question.asked_at is not None and self.num_computed_tokens < tokens and not question.waits_for_load

    def load_ended(self, *, ok: bool, given_up: bool = False) -> None:
        """A load of the request has ended. ``given_up``: a reset came before its end, and its blocks are not used."""
        self.is_loaded = True
        self.lookup_failed |= not ok
        self.lost_blocks |= given_up or not ok
