"""The patch that makes vLLM reject requests with too few cached tokens; see `HIT_THRESHOLD`."""

from __future__ import annotations

from typing import Any

from undercroft.config import UndercroftConfig
from undercroft.vllm_patches import frontend, rejections
from undercroft.vllm_patches.checks import has, needs, sets, takes
from undercroft.vllm_patches.exempt import exempt_requests, is_exempt
from undercroft.vllm_patches.table import HIT_THRESHOLD, guarded, replace


@guarded(HIT_THRESHOLD)
def reject_requests() -> None:
    """Let the scheduler end rejected requests and the frontend report them. Patches each process once.

    Nothing changes for a vLLM without a connector (or child of MultiConnector) that has ``take_threshold_rejects``.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.request import RequestStatus

    _check_engine()
    _check_frontend()

    def configured_answer(kv_transfer_config: Any) -> str | None:
        if kv_transfer_config is None or kv_transfer_config.kv_connector is None:
            return None
        extra = kv_transfer_config.kv_connector_extra_config or {}
        if hasattr(KVConnectorFactory.get_connector_class(kv_transfer_config), "take_threshold_rejects"):
            return UndercroftConfig.parse(extra).cache_hit_threshold_answer
        children = (configured_answer(type(kv_transfer_config)(**child)) for child in extra.get("connectors") or ())
        return next((answer for answer in children if answer is not None), None)

    def update_from_output(original: Any) -> Any:
        return rejections.wrap_update_from_output(
            original, RequestStatus.FINISHED_ABORTED, EngineCoreOutput, EngineCoreOutputs
        )

    def input_processor_init(original: Any) -> Any:
        return frontend.wrap_input_processor_init(original, configured_answer, exempt_requests)

    def to_sampling_params(original: Any) -> Any:
        return frontend.wrap_to_sampling_params(original, VLLMValidationError)

    rejected_state = frontend.make_rejected_state(RequestState)
    replace(
        (Scheduler, "update_from_output", update_from_output),
        (InputProcessor, "__init__", input_processor_init),
        (
            InputProcessor,
            "process_inputs",
            lambda original: frontend.wrap_process_inputs(original, VLLMValidationError, is_exempt),
        ),
        (
            OutputProcessor,
            "process_outputs",
            lambda original: frontend.wrap_process_outputs(original, rejected_state),
        ),
        (CompletionRequest, "to_sampling_params", to_sampling_params),
        (ChatCompletionRequest, "to_sampling_params", to_sampling_params),
    )


def _check_engine() -> None:
    """Check the internals of the scheduler and its requests that `rejections` and `HitThreshold` use."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request, RequestStatus

    takes(Scheduler, "update_from_output", "scheduler_output", "model_runner_output")
    takes(Scheduler, "finish_requests", "request_ids", "finished_status")
    sets(Scheduler, "connector", "requests")
    takes(Request, "get_finished_reason")
    takes(Request, "take_events")
    has(Request, "num_tokens", "is_finished")
    sets(Request, "request_id", "client_index", "trace_headers", "sampling_params", "kv_transfer_params")
    sets(Request, "resumable", "skip_reading_prefix_cache")
    needs(hasattr(RequestStatus, "FINISHED_ABORTED"), "RequestStatus has no FINISHED_ABORTED")
    has(EngineCoreOutput, "request_id", "new_token_ids", "finish_reason", "stop_reason", "events")
    has(EngineCoreOutput, "kv_transfer_params", "trace_headers")
    has(EngineCoreOutputs, "outputs")


def _check_frontend() -> None:
    """Check the internals of the processors, HTTP requests and outputs that `frontend` uses."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState
    from vllm.v1.metrics.stats import IterationStats

    takes(InputProcessor, "__init__", "vllm_config")
    takes(InputProcessor, "process_inputs", "request_id", "prompt", "params")
    takes(OutputProcessor, "process_outputs", "engine_core_outputs", "engine_core_timestamp", "iteration_stats")
    sets(OutputProcessor, "request_states")
    takes(RequestState, "_new_completion_output", "token_ids", "finish_reason", "stop_reason")
    sets(RequestState, "is_prefilling")
    takes(KVConnectorFactory, "get_connector_class", "kv_transfer_config")
    takes(VLLMValidationError, "__init__", "message", "parameter")
    for protocol in (CompletionRequest, ChatCompletionRequest):
        takes(protocol, "to_sampling_params")
        needs(protocol.model_config.get("extra") == "allow", f"{protocol.__name__} refuses further fields")
    has(OutputProcessorOutput, "request_outputs", "reqs_to_abort")
    has(CompletionOutput, "token_ids", "finish_reason", "stop_reason")
    has(SamplingParams, "extra_args")
    needs(hasattr(IterationStats(), "num_preempted_reqs"), "IterationStats has no num_preempted_reqs")
