"""The table of the requests that the scheduler's half knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undercroft import request_params
from undercroft.connector.scheduler.request_state import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

    from undercroft.config import UndercroftConfig
    from undercroft.connector.scheduler.steps import Steps
    from undercroft.connector.scheduler.tails import Tails


class Requests(dict[str, RequestState]):
    """All requests that the scheduler's half knows, by id."""

    def __init__(
        self, config: UndercroftConfig, tails: Tails, steps: Steps, report: Callable[[str, Exception], None]
    ) -> None:
        """``report`` takes a hook's name and an error in it."""
        self._config = config
        self._lookup = request_params.of_request(None, config)
        self._tails = tails
        self._steps = steps
        self._report = report
        self.epoch = 0
        """Number of resets of the device's cache: blocks that were computed before the last one are not saved."""

    def of(self, request: Request) -> RequestState:
        """The state of a request, which the first question or its arrival makes."""
        state = self.get(request.request_id)
        if state is None or state.request is not request:
            if state is not None:
                self._tails.drop(state)
                self._steps.gone(state)
            lookup = self._lookup
            if request.kv_transfer_params:
                try:
                    lookup = request_params.of_request(request.kv_transfer_params, self._config)
                except request_params.InvalidParameterError as error:
                    # The frontend refuses such requests. One that still reaches the scheduler uses the configuration.
                    self._report("on_new_request", error)
            state = self[request.request_id] = RequestState(request, lookup)
            state.saving.epoch = self.epoch
            self._steps.arrived(state)
        return state

    def save_again(self) -> None:
        """Offer all blocks of all requests to the tiers again."""
        for state in self.values():
            state.saving.save_again()
