"""A real vLLM engine in the test's own process: an engine starts in about 1.5 s once vLLM is imported.

The environment must be set before vLLM is imported, which is why vLLM is imported inside functions.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # One thread: the models are tiny, and threads that spin for each other cost more than they give.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set by the conftest before torch and vLLM are imported."""


TRUSTING = {"client_fields": ["threshold", "explain", "hints"]}
"""Requests may use every field."""
NOT_PLANNED = {"promotion_wait": "complete", "min_load_tokens": 64}
"""Options of engines that are not told otherwise: the loaded blocks follow from the test, not from how busy the machine
is."""

PRELOADED = [
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
]
"""Modules of the process from which servers and workers are forked."""


def set_environment() -> None:
    """Make vLLM run in this process, with a small KV cache. Variables that are set already stay."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one request."""

    tokens: list[int]
    cached: int
    """Prompt tokens that were not computed: from the device's prefix cache or from undercroft."""
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    """Per token, the log probabilities of the best tokens, if they were asked for."""


class Engine:
    """A vLLM engine, with undercroft if ``undercroft`` is given (its ``kv_connector_extra_config``)."""

    def __init__(
        self,
        model: Path,
        undercroft: Mapping[str, Any] | None = None,
        *,
        connector: str | None = None,
        module_path: str | None = None,
        dtype: str = "float32",
        blocks: int | None = None,
        max_model_len: int = 4096,
        max_num_seqs: int = 8,
        executor: str = "uni",
        transfer: Mapping[str, Any] | None = None,
        enforce_eager: bool = True,
        **engine_args: Any,
    ) -> None:
        """Start it.

        ``blocks``: device blocks of the KV cache (default: as many as fit 1 GiB). ``connector``, ``module_path``:
        another connector than undercroft. ``executor``: "mp" for worker processes, as tensor parallelism needs (on a
        machine of one NUMA node also VLLM_CPU_OMP_THREADS_BIND="0|1"). ``transfer``: further fields of
        ``KVTransferConfig``.
        """
        set_environment()
        if undercroft is not None:
            undercroft = NOT_PLANNED | TRUSTING | dict(undercroft)
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        if undercroft is not None or connector is not None:
            engine_args["kv_transfer_config"] = KVTransferConfig(
                kv_connector=connector or "UndercroftConnector",
                kv_connector_module_path=module_path,
                kv_role="kv_both",
                kv_connector_extra_config=dict(undercroft or {}),
                **(transfer or {}),
            )
        if blocks is not None:
            engine_args["num_gpu_blocks_override"] = blocks
        leave_modules_out_of_collections()
        if executor == "mp":
            _fork_workers_from_one_server()
        engine_args.setdefault("skip_tokenizer_init", True)
        # A block has as many tokens as a state has bytes. Left to vLLM, the type of states depends on the processor.
        engine_args.setdefault("mamba_ssm_cache_dtype", "float32")
        _let_groups_be_made_again()
        try:
            self.llm = LLM(
                model=str(model),
                enforce_eager=enforce_eager,
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                disable_log_stats=False,
                distributed_executor_backend=executor,
                **engine_args,
            )
        except BaseException:
            # vLLM leaves the worker's connector behind, and the next engine would find it.
            ensure_kv_transfer_shutdown()
            raise
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.steps = 0
        self._count_steps()

    def _count_steps(self) -> None:
        schedule = self.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return schedule(*args, **kwargs)

        self.scheduler.schedule = counted

    @property
    def connector(self) -> Any:
        """The scheduler's half of the connector."""
        return self.scheduler.connector

    def generate(self, ids: Sequence[int], n: int, **extra: Any) -> Generation:
        """Run one prompt to ``n`` tokens, greedily. ``extra``: see `generate_all`."""
        return self.generate_all([ids], n, **extra)[0]

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        *,
        params: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        logprobs: int | None = None,
        extra_args: Mapping[str, Any] | None = None,
        lora_request: Any = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Run prompts together. ``params``: ``kv_transfer_params`` of the requests. ``sampling``: `SamplingParams`."""
        from vllm import SamplingParams

        arguments = dict(extra_args or {})
        if params is not None:
            arguments["kv_transfer_params"] = dict(params)
        settings: dict[str, Any] = {
            "temperature": 0,
            "detokenize": False,
            "ignore_eos": True,
            **sampling,
        }
        sampling_params = SamplingParams(max_tokens=n, logprobs=logprobs, extra_args=arguments or None, **settings)
        inputs: list[Any] = [{"prompt_token_ids": list(ids)} for ids in prompts]
        if cache_salt is not None:
            for prompt in inputs:
                prompt["cache_salt"] = cache_salt
        outputs = self.llm.generate(inputs, sampling_params, use_tqdm=False, lora_request=lora_request)
        return [
            Generation(
                tokens=list(o.outputs[0].token_ids),
                cached=o.num_cached_tokens or 0,
                finish_reason=o.outputs[0].finish_reason,
                kv_transfer_params=o.kv_transfer_params,
                logprobs=[{t: p.logprob for t, p in step.items()} for step in o.outputs[0].logprobs or []],
            )
            for o in outputs
        ]

    def reset_device_cache(self, connector: bool = False) -> bool:
        """Empty the device's prefix cache, and with ``connector`` undercroft's too. False if blocks are in use."""
        return self.llm.llm_engine.engine_core.reset_prefix_cache(reset_connector=connector)

    def idle_steps(self, limit: int = 200_000) -> int:
        """Step without requests while the connector has work that only steps can end, as vLLM's own loop does.

        Returns the steps that it took. More than ``limit`` is a failure: vLLM would spin for ever.
        """
        for step in range(limit):
            if not (self.scheduler.has_requests() or self.core.batch_queue):
                return step
            self.core.step_fn()
        raise AssertionError(f"the connector still asks for steps after {limit} of them")

    def device_blocks_in_use(self) -> int:
        """Device blocks that are referenced; none once nothing runs and every copy is acknowledged."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def close(self) -> None:
        """Stop the engine and free its memory. Idempotent."""
        if getattr(self, "llm", None) is None:
            return
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core, self.scheduler
        gc.collect()


def prompt(n: int, seed: int = 0) -> list[int]:
    """``n`` token ids that are neither special nor the same for two seeds."""
    return [3 + (7 * i * (seed + 1) + 13 * seed + i // 31) % 990 for i in range(n)]


def same_block_size(kv_cache_config: Any) -> int:
    """The block size in tokens that all groups share."""
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    assert len(sizes) == 1, sizes
    return sizes.pop()


__all__ = [
    "ENVIRONMENT",
    "Engine",
    "Generation",
    "prompt",
    "same_block_size",
    "set_environment",
]


def _let_groups_be_made_again() -> None:
    """vLLM 0.33 makes the group of experts for models that have some only, and not for one that starts after others."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        parallel_state.destroy_model_parallel()


def leave_modules_out_of_collections() -> None:
    """Let the garbage collector skip the modules that are loaded before the first engine.

    vLLM walks all objects of the process a dozen times at the start and end of an engine: most of an engine's time in
    tests as small as these. It also freezes an engine's objects and thaws everything at its end; here the frozen
    modules stay so, and an engine's own objects are always collected.
    """
    if gc.unfreeze is _nothing:
        return
    from vllm.platforms import current_platform
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker

    modules = [core, gpu_worker]
    if current_platform.is_cpu():
        # Its model runner puts stand-ins into torch.cuda.
        from vllm.v1.worker import cpu_worker

        modules.append(cpu_worker)
        _replace_kernels_once()
    gc.collect()
    gc.freeze()
    gc.unfreeze = _nothing
    for module in modules:
        if hasattr(module, "freeze_gc_heap"):
            module.freeze_gc_heap = _nothing


def fork_server() -> ForkServerContext:
    """Starts processes by forking one that has imported vLLM once, which each of them would import anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "patient_ranks"])
    # Started here, since it finds modules by this variable alone. Each rank would compile a few small functions.
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TORCHDYNAMO_DISABLE": "1"}
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()
    return context


def _fork_workers_from_one_server() -> None:
    from vllm.v1.executor import multiproc_executor

    import patient_ranks  # noqa: F401

    multiproc_executor.get_mp_context = fork_server


def _replace_kernels_once() -> None:
    """vLLM's CPU build replaces Triton's kernels at the start of each engine, and looks for them in all modules."""
    from vllm.platforms.cpu import CpuPlatform

    if (replace := getattr(CpuPlatform, "register_triton_kernel_overrides", _nothing)) is not _nothing:
        replace()
        CpuPlatform.register_triton_kernel_overrides = staticmethod(_nothing)


def _nothing() -> None:
    """In place of a function that is not to run."""
