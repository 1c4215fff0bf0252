"""Installs the hooks in vLLM, after checking that its internals are the ones they were written for."""

from __future__ import annotations

import inspect
from typing import Any

from undercroft.threshold import engine, frontend


class _State:
    installed = False
    unavailable: str | None = "its hooks are not installed"


class UnknownInternalsError(Exception):
    """vLLM lacks something that the hooks use, or has it in another form."""


def install() -> None:
    """Put the hooks into vLLM's classes, once per process; called by the plugin in every process of vLLM.

    Never raises: if vLLM's internals are unknown nothing is changed, and `unavailable` says what was found.
    """
    if _State.installed:
        return
    _State.installed = True
    try:
        _install()
    except Exception as error:  # Unknown internals can fail a check in any way.
        _State.unavailable = f"this version of vLLM is unknown to its hooks ({type(error).__name__}: {error})"
    else:
        _State.unavailable = None


def unavailable() -> str | None:
    """Why requests cannot be rejected in this process; None if they can."""
    return _State.unavailable


def _install() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState
    from vllm.v1.metrics.stats import IterationStats
    from vllm.v1.request import Request, RequestStatus

    _takes(Scheduler, "update_from_output", "scheduler_output", "model_runner_output")
    _takes(Scheduler, "finish_requests", "request_ids", "finished_status")
    _takes(Request, "get_finished_reason")
    _takes(Request, "take_events")
    _takes(InputProcessor, "__init__", "vllm_config")
    _takes(InputProcessor, "process_inputs", "request_id", "prompt", "params")
    _takes(OutputProcessor, "process_outputs", "engine_core_outputs", "engine_core_timestamp", "iteration_stats")
    _takes(RequestState, "_new_completion_output", "token_ids", "finish_reason", "stop_reason")
    _takes(KVConnectorFactory, "get_connector_class", "kv_transfer_config")
    _takes(VLLMValidationError, "__init__", "message", "parameter")
    for protocol in (CompletionRequest, ChatCompletionRequest):
        _takes(protocol, "to_sampling_params")
        _needs(protocol.model_config.get("extra") == "allow", f"{protocol.__name__} refuses further fields")
    _has(EngineCoreOutput, "request_id", "new_token_ids", "finish_reason", "stop_reason", "events")
    _has(EngineCoreOutput, "kv_transfer_params", "trace_headers")
    _has(EngineCoreOutputs, "outputs")
    _has(OutputProcessorOutput, "request_outputs", "reqs_to_abort")
    _has(CompletionOutput, "token_ids", "finish_reason", "stop_reason")
    _has(SamplingParams, "extra_args")
    _has(Request, "num_tokens", "is_finished")
    _sets(Request, "request_id", "client_index", "trace_headers", "sampling_params", "kv_transfer_params")
    _sets(Request, "resumable", "skip_reading_prefix_cache")
    _sets(Scheduler, "connector", "requests")
    _sets(OutputProcessor, "request_states")
    _sets(RequestState, "is_prefilling")
    _needs(hasattr(RequestStatus, "FINISHED_ABORTED"), "RequestStatus has no FINISHED_ABORTED")
    _needs(hasattr(IterationStats(), "num_preempted_reqs"), "IterationStats has no num_preempted_reqs")

    def uses_undercroft(kv_transfer_config: Any) -> bool:
        if kv_transfer_config is None or kv_transfer_config.kv_connector is None:
            return False
        if hasattr(KVConnectorFactory.get_connector_class(kv_transfer_config), "take_threshold_rejects"):
            return True
        children = (kv_transfer_config.kv_connector_extra_config or {}).get("connectors") or ()
        return any(uses_undercroft(type(kv_transfer_config)(**child)) for child in children)

    # All checks have passed: from here on nothing can fail half-way.
    Scheduler.update_from_output = engine.wrap_update_from_output(
        Scheduler.update_from_output, RequestStatus.FINISHED_ABORTED, EngineCoreOutput, EngineCoreOutputs
    )
    InputProcessor.__init__ = frontend.wrap_input_processor_init(InputProcessor.__init__, uses_undercroft)
    InputProcessor.process_inputs = frontend.wrap_process_inputs(InputProcessor.process_inputs, VLLMValidationError)
    OutputProcessor.process_outputs = frontend.wrap_process_outputs(
        OutputProcessor.process_outputs, frontend.make_rejected_state(RequestState)
    )
    for protocol in (CompletionRequest, ChatCompletionRequest):
        protocol.to_sampling_params = frontend.wrap_to_sampling_params(protocol.to_sampling_params, VLLMValidationError)


def _takes(owner: type, method: str, *names: str) -> None:
    function = getattr(owner, method, None)
    _needs(function is not None, f"{owner.__name__} has no {method}")
    known = inspect.signature(function).parameters
    for name in names:
        _needs(name in known, f"{owner.__name__}.{method} has no parameter {name}")


def _sets(owner: type, *attributes: str) -> None:
    for attribute in attributes:
        _needs(attribute in owner.__init__.__code__.co_names, f"{owner.__name__} sets no {attribute}")


def _has(owner: type, *fields: str) -> None:
    known = getattr(owner, "__struct_fields__", None) or getattr(owner, "__annotations__", {})
    for field in fields:
        _needs(field in known or hasattr(owner, field), f"{owner.__name__} has no {field}")


def _needs(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnknownInternalsError(otherwise)
