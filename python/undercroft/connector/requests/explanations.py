"""Explains how much of a request was loaded: in the log (``log_requests``), in the response (``explain``), in spans.

The explanation is made when vLLM admits the request, from the answer of its last lookup. For a request without
explanation the cost is a comparison.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from undercroft import compat, reasons, request_params
from undercroft.connector.requests.spans import Spans, is_traced
from undercroft.log import logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft._core import Session

SPAN = "undercroft.lookup"


class Explanations:
    """Explains the requests of one scheduler."""

    def __init__(
        self,
        session: Session,
        log_requests: str,
        *,
        may_tell: bool = True,
        world_size: int = 1,
    ) -> None:
        """``log_requests``: the option. ``may_tell``: whether requests may ask for an explanation in their
        responses. ``world_size``: the ranks that copy each save."""
        self._may_tell = may_tell
        self._session = session
        self._log_requests = log_requests
        self.spans = Spans(world_size) if is_traced() else None
        """None unless vLLM traces requests."""
        self._asked: dict[str, tuple[int, float]] = {}
        """By request: tokens on the device at the scheduler's last call, and the time of its first call."""
        self._admitted: dict[str, dict[str, Any] | None] = {}
        """The explanation for the response, by request; None if the request did not ask for it."""

    def asked(self, request: Request, device_tokens: int) -> None:
        """The scheduler asks about a request; the device holds ``device_tokens`` of its tokens."""
        if request.request_id in self._admitted or not self._is_wanted(request):
            return
        first = self._asked.get(request.request_id)
        self._asked[request.request_id] = (device_tokens, time.time() if first is None else first[1])

    def admitted(self, request: Request, loaded_tokens: int) -> None:
        """The request got its blocks, and a load of ``loaded_tokens`` begins. Call this before the lookup ends."""
        asked = self._asked.pop(request.request_id, None)
        if asked is None:
            return
        device_tokens, since = asked
        reason, ago_s = self._session.rest(request.request_id) or ("complete", None)
        told = {
            "prompt_tokens": request.num_prompt_tokens,
            "device_tokens": device_tokens,
            "loaded_tokens": loaded_tokens,
            "waited_ms": round(1e3 * (time.time() - since), 1),
            "reason": reason,
            "reason_age_s": ago_s,
        }
        if self._log_requests == "all" or (self._log_requests == "misses" and reason != "complete"):
            _log(request.request_id, told)
        if self.spans is not None and (headers := getattr(request, "trace_headers", None)):
            attributes = {f"{SPAN}.{name}": value for name, value in told.items() if value is not None}
            compat.trace(SPAN, since, headers, attributes)
        self._admitted[request.request_id] = told if self._asks(request) else None

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """The explanation of a request that has ended, for the response's ``kv_transfer_params``."""
        if self.spans is not None:
            self.spans.finished(request_id)
        self._asked.pop(request_id, None)
        told = self._admitted.pop(request_id, None)
        return None if told is None else {request_params.EXPLAIN: told}

    def _is_wanted(self, request: Request) -> bool:
        return self._log_requests != "off" or self.spans is not None or (self._may_tell and self._asks(request))

    def _asks(self, request: Request) -> bool:
        """Whether the response must have an explanation."""
        return self._may_tell and request_params.wants_explanation(request.kv_transfer_params)


def _log(request_id: str, told: dict[str, Any]) -> None:
    logger.info(
        "undercroft: request %s: %d prompt tokens, %d on the device, %d loaded after %.0f ms: %s",
        request_id,
        told["prompt_tokens"],
        told["device_tokens"],
        told["loaded_tokens"],
        told["waited_ms"],
        reasons.sentence(told["reason"], told["reason_age_s"]),
    )
