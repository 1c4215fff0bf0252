"""The engine's part of the hit threshold: vLLM's scheduler ends the requests that the threshold rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STOP_REASON = "cache_threshold"
"""Marks a rejected request between engine and frontend. vLLM's engine itself sets only token ids as stop reasons. The
stop strings of users are found in the frontend only, so they cannot be mistaken for this mark."""

HINT_REASON = "kv_hint"
"""Marks a request with hints and nothing to compute, in the same way."""
REASONS = frozenset({STOP_REASON, HINT_REASON})

_TAKE = "_undercroft_take_threshold_rejects"


def wrap_update_from_output(
    original: Callable[..., dict[int, Any]], aborted: Any, output_type: Any, outputs_type: Any
) -> Callable[..., dict[int, Any]]:
    """``Scheduler.update_from_output`` that first ends rejected requests and adds their outputs to the step's.

    Rejected requests end as aborted (``aborted``: the RequestStatus), since no token of them was computed: no connector
    may use their blocks as a result. They end before the original runs, so that its bookkeeping of finished requests
    includes them.
    """

    def update_from_output(scheduler: Any, *args: Any, **kwargs: Any) -> dict[int, Any]:
        # The search through the connector's children would cost each step.
        try:
            take = scheduler.__dict__[_TAKE]
        except KeyError:
            take = scheduler.__dict__[_TAKE] = find_take(scheduler.connector)
        rejections = take() if take is not None else None
        if not isinstance(rejections, list) or not rejections:
            # No list: such as from a stand-in for a connector, which has every attribute.
            return original(scheduler, *args, **kwargs)
        by_id = {rejection.request_id: rejection for rejection in rejections}
        ended = [request for name in by_id if (request := scheduler.requests.get(name)) and not request.is_finished()]
        scheduler.finish_requests(list(by_id), aborted)
        outputs = original(scheduler, *args, **kwargs)
        for request in ended:
            client = outputs.get(request.client_index)
            if client is None:
                client = outputs[request.client_index] = outputs_type(outputs=[])
            client.outputs.append(
                output_type(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=by_id[request.request_id].reason,
                    events=request.take_events(),
                    kv_transfer_params=by_id[request.request_id].response_params(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs

    return update_from_output


def find_take(connector: Any) -> Callable[[], list[Any]] | None:
    """``take_threshold_rejects`` of this connector or, in a MultiConnector, of a child; None if there is none."""
    if connector is None:
        return None
    take: Callable[[], list[Any]] | None = getattr(connector, "take_threshold_rejects", None)
    if take is not None:
        return take
    children = getattr(connector, "_connectors", ())
    found = map(find_take, children if isinstance(children, list | tuple) else ())
    return next((take for take in found if take is not None), None)
