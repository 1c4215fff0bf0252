"""Fields of requests that are not used as they were given: counted, said once in the log, and named in the response.

Three kinds: a wait above the configuration's (``over_limit``), a field that the option ``client_fields`` does not allow
(``not_allowed``), and a field that looks like a misspelled one of undercroft's (``unknown``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from undercroft import hints, request_params
from undercroft.log import LogOnce
from undercroft.threshold import params as threshold

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft.config import UndercroftConfig
    from undercroft.connector.observe.stats import Counts

ANSWER = "not_used"
"""Key of the answer in the response's ``kv_transfer_params``: each field, with the reason."""
OVER_LIMIT, NOT_ALLOWED, UNKNOWN = "over_limit", "not_allowed", "unknown"
WORDS = {threshold.NAME: "threshold", request_params.EXPLAIN: "explain", hints.NAME: "hints"}
"""Fields that need the operator's word, and the word of the option ``client_fields``."""


class ClientFields:
    """What the requests of one scheduler asked for in vain."""

    def __init__(self, config: UndercroftConfig, counts: Counts) -> None:
        self._config = config
        self._counts = counts
        self._log_once = LogOnce()
        self._answers: dict[str, dict[str, Any]] = {}

    def arrived(self, request: Request) -> None:
        """A request has arrived."""
        params = request.kv_transfer_params
        extra_args = getattr(request.sampling_params, "extra_args", None)
        if not params and not extra_args and getattr(request, hints.NAME, None) is None:
            return
        answers: dict[str, Any] = {}
        try:
            capped = request_params.of_request(params, self._config).capped
        except request_params.InvalidParameterError:
            capped = ()  # The scheduler's half reports it.
        for name in capped:
            answers[name] = {"reason": OVER_LIMIT}
            self._note(
                name,
                OVER_LIMIT,
                "is above that of the configuration, which applies",
                "a request may wait less, not more",
            )
        for name in self._refused(request, params, extra_args):
            answers[name] = {"reason": NOT_ALLOWED}
            advice = f'set client_fields to a list with "{WORDS[name]}" if all clients may use it (docs/security.md)'
            self._note(name, NOT_ALLOWED, "is not allowed by the option client_fields, and ignored", advice)
        for name, near in request_params.misspelled(params).items():
            answers[name] = {"reason": UNKNOWN, "nearest": near}
            self._note(name, UNKNOWN, "is unknown, and ignored", f"did you mean {near}?")
        if answers:
            self._answers[request.request_id] = answers

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """The fields of a request that has ended which were not used as given, for the response."""
        answers = self._answers.pop(request_id, None) if self._answers else None
        return None if answers is None else {ANSWER: answers}

    def _refused(self, request: Request, params: Any, extra_args: Any) -> list[str]:
        """The fields that the request asks something with and that are not allowed."""
        params = params if isinstance(params, dict) else {}
        extra_args = extra_args if isinstance(extra_args, dict) else {}
        own = [one.get(threshold.NAME) for one in (extra_args, params)]
        asked = {
            threshold.NAME: not extra_args.get(threshold.EXEMPT)
            and any(value not in (None, self._config.cache_hit_threshold) for value in own),
            request_params.EXPLAIN: request_params.wants_explanation(params),
            hints.NAME: params.get(hints.NAME) is not None or getattr(request, hints.NAME, None) is not None,
        }
        return [name for name, asks in asked.items() if asks and WORDS[name] not in self._config.client_fields]

    def _note(self, name: str, reason: str, what: str, advice: str) -> None:
        self._counts.add(f"not_used_{name if reason != UNKNOWN else 'other'}")
        message = "undercroft: %s of a request %s: %s. Further ones are only counted (metric request_fields_not_used)."
        self._log_once(logging.WARNING, (name if reason != UNKNOWN else UNKNOWN, reason), message, name, what, advice)
