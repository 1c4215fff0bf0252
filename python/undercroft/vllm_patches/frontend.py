"""The frontend's part of the hit threshold: it reads the request parameters and reports the finish reason."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from undercroft import hints, request_params
from undercroft.log import LogOnce
from undercroft.threshold.params import ANSWER, EXEMPT, NAME, InvalidThresholdError, answer_of_request, of_request
from undercroft.vllm_patches import refusals
from undercroft.vllm_patches.rejections import REASONS, STOP_REASON
from undercroft.vllm_patches.table import HIT_THRESHOLD, failed

OURS = "_undercroft_threshold"
"""Attribute of an `InputProcessor`: whether its engine uses undercroft."""
_log_once = LogOnce()


class Frontend:
    """Whether any engine of this process's frontend uses undercroft. HTTP requests are parsed differently only then."""

    active = False


class EmptyDelta(list[int]):
    """A true empty list of tokens: vLLM's streams drop a chunk, with its finish reason, if its tokens are false."""

    def __bool__(self) -> bool:
        return True


def wrap_input_processor_init(
    original: Callable[..., None], configured_answer: Callable[[Any], str | None], exempt_requests: Callable[[], bool]
) -> Any:
    """``InputProcessor.__init__`` that notes whether its engine uses undercroft, and then calls ``exempt_requests``.

    ``configured_answer``: the option ``cache_hit_threshold_answer`` of an engine that uses undercroft, None for others.
    """

    def init(processor: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(processor, vllm_config, *args, **kwargs)
        try:
            answer = configured_answer(vllm_config.kv_transfer_config)
        except Exception as error:  # A connector whose class cannot be found is not undercroft's.
            failed(HIT_THRESHOLD, error)
            answer = None
        processor.__dict__[OURS] = answer is not None
        if answer is not None:
            Frontend.active = True
            refusals.Configured.answer = answer
            exempt_requests()

    return init


def wrap_process_inputs(
    original: Callable[..., Any], validation_error: Callable[..., Exception], is_exempt: Callable[[], bool]
) -> Callable[..., Any]:
    """``InputProcessor.process_inputs`` that refuses invalid parameters of every kind of request.

    A request that ``is_exempt`` is marked, and never rejected, even if it has a threshold. No client may set the mark.
    """

    def process_inputs(processor: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if processor.__dict__.get(OURS):
            _check_hints(None, kwargs.get(hints.NAME), validation_error)
            extra_args = getattr(params, "extra_args", None)
            own = _checked(extra_args, validation_error) if extra_args else None
            exempt = hasattr(params, "extra_args") and is_exempt()
            if extra_args and EXEMPT in extra_args and not exempt:
                params = copy.copy(params)
                params.extra_args = {name: value for name, value in extra_args.items() if name != EXEMPT} or None
            if exempt:
                if own:
                    message = (
                        "undercroft: %s of request %s is ignored, and that of later requests like it: their answers "
                        "cannot report a rejection (docs/hit-threshold.md)"
                    )
                    _log_once(logging.WARNING, "ignored", message, NAME, request_id)
                params = copy.copy(params)
                params.extra_args = {**_computed(extra_args or {}), EXEMPT: True}
        return original(processor, request_id, prompt, params, *args, **kwargs)

    return process_inputs


def wrap_to_sampling_params(
    original: Callable[..., Any], validation_error: Callable[..., Exception]
) -> Callable[..., Any]:
    """``to_sampling_params`` of an HTTP request that understands the fields of `undercroft.threshold.params`.

    Values are checked here, before a stream begins. In a stream an error would be an event after the status 200.
    """

    def to_sampling_params(request: Any, *args: Any, **kwargs: Any) -> Any:
        sampling = original(request, *args, **kwargs)
        if Frontend.active:
            for name in (NAME, ANSWER):
                value = (request.model_extra or {}).get(name)
                if value is not None:
                    sampling.extra_args = {**(sampling.extra_args or {}), name: value}
            if sampling.extra_args:
                _checked(sampling.extra_args, validation_error)
        return sampling

    return to_sampling_params


def wrap_process_outputs(original: Callable[..., Any], rejected_state: type) -> Callable[..., Any]:
    """``OutputProcessor.process_outputs`` that gives rejected requests their finish reason.

    vLLM's statistics leave out rejected requests: vLLM would count a prefill and a time to first token for each.
    `HitThreshold.rejections` counts them. If a rejected request was running before, vLLM counts it as aborted.
    """

    def process_outputs(
        processor: Any,
        engine_core_outputs: list[Any],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Nearly every step has no rejection, and is left as it is.
        for output in engine_core_outputs:
            if output.stop_reason in REASONS:
                break
        else:
            return original(processor, engine_core_outputs, engine_core_timestamp, iteration_stats, *args, **kwargs)
        served: list[Any] = []
        unserved: list[Any] = []
        for output in engine_core_outputs:
            state = processor.request_states.get(output.request_id)
            if state is None or output.stop_reason not in REASONS:
                served.append(output)
                continue
            # vLLM made the state when the request came, and takes the finish reason from it.
            state.__class__ = rejected_state
            (unserved if state.is_prefilling else served).append(output)
            if state.is_prefilling and output.stop_reason == STOP_REASON:
                refusals.refuse(state, output.kv_transfer_params)
        result = original(processor, served, engine_core_timestamp, iteration_stats, *args, **kwargs)
        if unserved:
            aside = type(iteration_stats)() if iteration_stats is not None else None
            more = original(processor, unserved, engine_core_timestamp, aside, *args, **kwargs)
            if aside is not None:
                # A preemption has happened all the same; a prefill and a first token have not.
                iteration_stats.num_preempted_reqs += aside.num_preempted_reqs
            result.request_outputs.extend(more.request_outputs)
            result.reqs_to_abort.extend(more.reqs_to_abort)
        return result

    return process_outputs


def make_rejected_state(request_state: Any) -> type:
    """Make a subclass of vLLM's RequestState whose last output has the reason of the rejection."""

    class RejectedRequestState(request_state):
        """State of a request that the cache hit threshold rejected."""

        def _new_completion_output(self, token_ids: list[int], finish_reason: Any, stop_reason: Any) -> Any:
            output = super()._new_completion_output(token_ids, finish_reason, None)
            output.finish_reason = stop_reason
            if not output.token_ids:
                output.token_ids = EmptyDelta()
            return output

    return RejectedRequestState


def _checked(extra_args: dict[str, Any], validation_error: Callable[..., Exception]) -> float | None:
    """The threshold of a request; None if it has none. Notes its answer to a rejection. Raises vLLM's error for an
    invalid parameter."""
    try:
        request_params.check(extra_args.get("kv_transfer_params"))
        _check_hints(extra_args.get("kv_transfer_params"), None, validation_error)
        refusals.choose_answer(answer_of_request(extra_args))
        return of_request(extra_args)
    except InvalidThresholdError as error:
        raise validation_error(str(error), parameter=error.name) from None
    except request_params.InvalidParameterError as error:
        raise validation_error(str(error), parameter=error.name) from None


def _check_hints(kv_transfer_params: Any, kv_hints: Any, validation_error: Callable[..., Exception]) -> None:
    try:
        hints.of_request(kv_transfer_params, kv_hints)
    except hints.InvalidHintError as error:
        raise validation_error(str(error), parameter=error.name) from None


def _computed(extra_args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a request that is always computed, because its answer cannot report that it was not."""
    params = extra_args.get("kv_transfer_params")
    if not isinstance(params, dict):
        return extra_args
    given = params.get(hints.NAME)
    if not given or given.get(hints.COMPUTE) is not False:
        return extra_args
    return {**extra_args, "kv_transfer_params": {**params, hints.NAME: {**given, hints.COMPUTE: True}}}
