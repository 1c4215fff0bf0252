"""Hints: passes a request's hints to the engine, and puts the answers to them into the response.

A prefetch begins when the request arrives. The other hints concern all blocks that the request leaves in the cache, so
the engine gets them after the request's last save. A request with hints and nothing to compute ends before a step
computes any of its tokens.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from undercroft import hints as forms
from undercroft.log import LogOnce
from undercroft.vllm_patches.rejections import HINT_REASON

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft._core import Session
    from undercroft.connector.groups import Groups
    from undercroft.connector.observe.stats import Counts
    from undercroft.hints import Hint, Hints

MAX_ASKS = 256
"""A request with hints alone is computed all the same if the scheduler asks about it more often than this."""
_SUFFIX = "\0hint"
"""Makes the name of the engine's request for the hints: vLLM's request of the same name may have ended."""


@dataclass(frozen=True, slots=True)
class HintsOnly:
    """A request with hints alone: the engine has the hints, and the scheduler ends the request."""

    request_id: str
    answers: dict[str, Any]

    reason = HINT_REASON
    """The finish reason."""

    def response_params(self) -> dict[str, Any]:
        """The ``kv_transfer_params`` of the response."""
        return {forms.NAME: self.answers}


class RequestHints:
    """The hints of one scheduler's requests.

    ``complete``: returns how many of the engine's blocks of a request are complete after a number of computed tokens.
    ``may_end``: whether vLLM can end a request with hints and nothing to compute. ``is_allowed``: whether requests may
    give hints; if not, each is rejected.
    """

    def __init__(
        self,
        session: Session,
        groups: Groups,
        counts: Counts,
        complete: Callable[[Request, int], int],
        *,
        may_end: bool,
        is_allowed: bool = True,
    ) -> None:
        self._is_allowed = is_allowed
        self._session = session
        self._groups = groups
        self._counts = counts
        self._complete = complete
        self._may_end = may_end
        self._hints: dict[str, Hints] = {}
        """The hints of requests that are computed, by request."""
        self._only: dict[str, int] = {}
        """Requests that are not computed, each with the number of times that the scheduler has asked about it."""
        self.ended: list[HintsOnly] = []
        """Requests with hints alone whose hints the engine has, until `collect`."""
        self._log_once = LogOnce()
        self._answers: dict[str, dict[str, Any]] = {}

    def arrived(self, request: Request) -> None:
        """A request has arrived."""
        params, typed = request.kv_transfer_params, getattr(request, "kv_hints", None)
        if not params and typed is None:
            return
        hints = forms.of_request(params, typed)
        if not hints.hints and not hints.unknown:
            return
        self._note_unknown(hints)
        if not hints.computes and self._may_end and request.sampling_params is not None and not request.resumable:
            answers = _unknown(hints) | self._give(request, hints.hints, request.num_tokens)
            self._only[request.request_id] = 0
            self.ended.append(HintsOnly(request.request_id, answers))
            return
        self._hints[request.request_id] = hints
        early = tuple(hint for hint in hints.hints if hint.verb == "prefetch")
        if early:
            self._answers[request.request_id] = self._give(request, early, request.num_tokens)

    def wants(self, request_id: str) -> bool:
        """Whether a hint names a request's blocks, so that they are saved however little they seem to be worth."""
        hints = self._hints.get(request_id) if self._is_allowed else None
        return hints is not None and any(
            hint.verb in ("pin", "prefetch") and hint.hashes is None for hint in hints.hints
        )

    def holds_back(self, request: Request) -> bool:
        """Whether a request has hints alone: the scheduler gets the answer "later" until it ends the request."""
        asks = self._only.get(request.request_id)
        if asks is None:
            return False
        if asks >= MAX_ASKS:
            del self._only[request.request_id]
            return False
        self._only[request.request_id] = asks + 1
        return True

    def collect(self) -> list[HintsOnly]:
        """The requests with hints alone whose hints the engine got since the last call. The caller ends them."""
        ended, self.ended = self.ended, []
        return ended

    def finished(self, request: Request) -> dict[str, Any] | None:
        """A request has finished, and its last save has begun. Returns the answers to its hints, for the response."""
        self._only.pop(request.request_id, None)
        answers = self._answers.pop(request.request_id, {})
        hints = self._hints.pop(request.request_id, None)
        if hints is None:
            return None
        late = tuple(hint for hint in hints.hints if hint.verb != "prefetch")
        saved = self._complete(request, request.num_computed_tokens) * self._groups.engine_block_size
        return {forms.NAME: _unknown(hints) | answers | self._give(request, late, saved)}

    def _give(self, request: Request, hints: tuple[Hint, ...], tokens: int) -> dict[str, Any]:
        """Pass hints about the first ``tokens`` tokens of a request to the engine. Returns the answers by key."""
        answers: dict[str, Any] = {}
        if not self._is_allowed:
            return {hint.key: {"answer": "rejected", "tokens": 0, "reason": "not_allowed"} for hint in hints}
        if not hints:
            return answers
        name = request.request_id + _SUFFIX
        hashes = self._groups.hashes(request.block_hashes)
        try:
            for hint in hints:
                chain, most = hashes, tokens
                if hint.hashes is not None:
                    chain, most = list(hint.hashes), len(hint.hashes) * self._groups.engine_block_size
                most = most if hint.tokens is None else min(most, hint.tokens)
                answers[hint.key] = self._answer(
                    *self._session.hint(name, chain, hint.verb, most, hint.ttl_s, _scoped(hint.name, request))
                )
        finally:
            self._session.finish_request(name)
        return answers

    def _note_unknown(self, hints: Hints) -> None:
        self._counts.add("hints_unknown", len(hints.unknown))
        for key, near in hints.unknown.items():
            meant = f"; did you mean {near}?" if near else ""
            message = "undercroft: the hint %s of a request is unknown, and ignored%s. Further ones are only counted."
            self._log_once(logging.WARNING, "unknown", message, key, meant)

    def _answer(self, state: str, tokens: int, reason: str) -> dict[str, Any]:
        if reason == "unavailable":
            self._counts.add("hints_unserved")
        return {"answer": state, "tokens": tokens, **({"reason": reason} if reason else {})}


def _unknown(hints: Hints) -> dict[str, Any]:
    """The answers to hints of unknown kinds."""
    return {key: {"answer": "unknown", **({"nearest": near} if near else {})} for key, near in hints.unknown.items()}


def _scoped(name: str, request: Request) -> str:
    """The engine's name of a pin. Requests with another ``cache_salt`` can neither release nor replace it."""
    salt = getattr(request, "cache_salt", None)
    if not name or not salt:
        return name
    digest = hashlib.sha256(b"".join(forms.utf8(part) + b"\0" for part in (salt, name))).hexdigest()
    return f"salted-{digest[:48]}"


class NoHints:
    """Stands for `RequestHints` where no engine takes hints."""

    ended = ()

    def arrived(self, request: Request) -> None:
        """See `RequestHints.arrived`."""

    def holds_back(self, request: Request) -> bool:
        """See `RequestHints.holds_back`."""
        return False

    def collect(self) -> list[HintsOnly]:
        """See `RequestHints.collect`."""
        return []

    def finished(self, request: Request) -> dict[str, Any] | None:
        """See `RequestHints.finished`."""
        return None


NO_HINTS = NoHints()
