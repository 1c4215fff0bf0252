"""Decides whether enough of a request is cached for this engine to serve it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from undercroft import log
from undercroft.threshold import params

logger = log.child("threshold")

Source = Literal["request", "global"]

MAX_ASKS = 256
"""Most calls for a rejected request. vLLM ends the request within a few steps. A scheduler that never ends it would
starve the request, so after this many calls the threshold is switched off."""


class Request(Protocol):
    """The attributes of vLLM's ``Request`` that the decision reads."""

    request_id: str
    num_tokens: int
    """Tokens of the prompt, and of a request that resumes after a preemption also the generated tokens."""
    sampling_params: Any
    kv_transfer_params: dict[str, Any] | None
    resumable: bool
    skip_reading_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected request, and the token counts of the decision."""

    request_id: str
    threshold: float
    source: Source
    local_tokens: int
    external_tokens: int
    required_tokens: int
    reports_figures: bool = True
    """Whether the response has the token counts, which tell how much of the prompt other requests have used."""

    reason = "cache_threshold"
    """The finish reason."""

    @property
    def hit_rate(self) -> float:
        """The cached share of the required tokens."""
        return min(self.local_tokens + self.external_tokens, self.required_tokens) / self.required_tokens

    def response_params(self) -> dict[str, Any]:
        """The ``kv_transfer_params`` of the response.

        The values are nested, so that a router that passes them on to another instance does not pass on a threshold.
        """
        figures = {
            "hit_rate": round(self.hit_rate, 6),
            "local_tokens": self.local_tokens,
            "external_tokens": self.external_tokens,
            "required_tokens": self.required_tokens,
        }
        told = {"threshold": self.threshold, "source": self.source}
        return {"cache_threshold": told | figures if self.reports_figures else told}

    def __str__(self) -> str:
        # Rounded down, in whole numbers: a rate just below the threshold must not look equal to the threshold.
        cached = min(self.local_tokens + self.external_tokens, self.required_tokens)
        percent = cached * 100 // self.required_tokens
        return (
            f"Request {self.request_id} rejected: cache hit rate {percent // 100}.{percent % 100:02d} "
            f"< threshold {self.threshold:g} ({self.source})"
        )


class HitThreshold:
    """The scheduler connector's half: decides, and keeps the rejected requests until the scheduler collects them.

    Only the scheduler's thread uses it. ``unavailable``: the reason why vLLM cannot reject requests; None if it can.
    With a reason, no request is rejected. ``requests_choose``: whether a request's own threshold counts.
    ``reports_figures``: see `Rejection`.
    """

    def __init__(
        self,
        global_threshold: float,
        unavailable: str | None = None,
        *,
        requests_choose: bool = True,
        reports_figures: bool = True,
    ) -> None:
        self._global = global_threshold
        self._requests_choose = requests_choose
        self._reports_figures = reports_figures
        self._unavailable = unavailable
        self._log_once = log.LogOnce(logger)
        self.rejected: dict[str, Rejection] = {}
        """Rejected requests until `collect`, by id."""
        self._asks: dict[str, int] = {}
        self.rejections: dict[Source, int] = {"request": 0, "global": 0}
        """Rejected requests since the start, by the source of their threshold."""

    def check(self, request: Request, local_tokens: int, external_tokens: int) -> bool:
        """Whether the request is rejected; the connector then answers ``(None, False)``.

        The connector asks with every final answer of a lookup, even a miss. ``local_tokens``: tokens in the device's
        prefix cache. ``external_tokens``: further tokens that the connector offers. The connector may ask again for the
        same request before `collect`: the last answer holds.
        """
        threshold, source = self._threshold_of(request)
        if threshold <= 0:
            return False
        if request.skip_reading_prefix_cache:
            local_tokens = external_tokens = 0
        required = request.num_tokens
        if required == 0 or (local_tokens + external_tokens) / required >= threshold:
            self.discard(request.request_id)
            return False
        request_id = request.request_id
        asks = self._asks.get(request_id, 0) + 1
        if asks > MAX_ASKS:
            self._unavailable = f"the scheduler did not end rejected request {request_id} in {MAX_ASKS} steps"
            self.rejected.clear()
            self._asks.clear()
            logger.error("undercroft: cache_hit_threshold is switched off: %s", self._unavailable)
            return False
        self._asks[request_id] = asks
        self.rejected[request_id] = Rejection(
            request_id, threshold, source, local_tokens, external_tokens, required, self._reports_figures
        )
        return True

    def needed_tokens(self, request: Request) -> int:
        """The least number of cached tokens with which `check` accepts the request; 0 if `check` never rejects it."""
        threshold, _ = self._threshold_of(request)
        required = request.num_tokens
        if threshold <= 0 or required == 0:
            return 0
        needed = math.ceil(threshold * required)
        return needed - 1 if (needed - 1) / required >= threshold else needed

    def collect(self) -> list[Rejection]:
        """Rejected requests since the last call; logs and counts each. The caller finishes them."""
        if not self.rejected:
            return []
        collected = list(self.rejected.values())
        self.rejected.clear()
        self._asks.clear()
        for rejection in collected:
            self.rejections[rejection.source] += 1
            logger.info("%s", rejection)
        return collected

    def discard(self, request_id: str) -> None:
        """Forget a request that is finished, aborted or admitted. An unknown request is ignored."""
        if self.rejected:
            self.rejected.pop(request_id, None)
            self._asks.pop(request_id, None)

    def _threshold_of(self, request: Request) -> tuple[float, Source]:
        """The threshold of a request, and the threshold's source; 0 if there is none."""
        sampling = request.sampling_params
        if sampling is None:  # Pooling: nothing is decoded.
            return 0.0, "global"
        threshold: float = self._global
        source: Source = "global"
        if sampling.extra_args:
            if sampling.extra_args.get(params.EXEMPT):
                return 0.0, "request"
            own = self._own_threshold(request)
            if own is not None:
                threshold, source = own, "request"
        if threshold <= 0 or not self._applies(request, source):
            return 0.0, source
        return threshold, source

    def _own_threshold(self, request: Request) -> float | None:
        if not self._requests_choose:
            return None
        try:
            return params.of_request(request.sampling_params.extra_args, request.kv_transfer_params)
        except params.InvalidThresholdError as error:
            # The frontend refuses such values. A request that did not pass the frontend must not stop the engine.
            self._log_ignored(f"request {request.request_id}: {error}")
            return None

    def _applies(self, request: Request, source: Source) -> bool:
        if request.resumable:  # Streaming input: its tokens are not complete.
            return False
        if self._unavailable is not None:
            if source == "request":
                self._log_ignored(f"request {request.request_id} asks for {params.NAME}, but {self._unavailable}")
            return False
        return True

    def _log_ignored(self, why: str) -> None:
        message = "undercroft: %s is ignored; further cases are not logged: %s"
        self._log_once(logging.WARNING, "ignored", message, params.NAME, why)
