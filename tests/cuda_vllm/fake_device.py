"""Starts vLLM's CUDA platform over the fake CUDA.

vLLM's Python is its own. Others are the detection of the platform, the warm-up, and kernels that are not Triton's.
On a GPU (`tools/gpu_day`) the kernels are the GPU's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import fake_cuda

MARK = "CUDA_VLLM_WHEEL"
"""Environment variable: the folder of the unpacked wheel that this process's vLLM comes from."""
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Its images of FlashInfer and DeepGEMM need a compiler for GPUs.
    "VLLM_USE_DEEP_GEMM": "0",
    # Graphs of the pieces between attention, without a compiler.
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
}
ON_GPU = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    # Products of float32 are otherwise rounded to fewer bits, and tokens would depend on the size of a batch.
    "TRITON_F32_DEFAULT": "ieee",
}
NATIVE = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"], "gelu_and_mul_sparse": ["native"]}
ENGINE: Mapping[str, Any] = {
    "attention_config": {"backend": "TRITON_ATTN"},
    "compilation_config": {"custom_ops": ["none"], "mode": 0},
    "kernel_config": {"ir_op_priority": NATIVE, "enable_jit_warmup": False},
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 16 << 20,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
}
"""Arguments of every engine: a backend whose kernels are Triton's, and PyTorch's own operators elsewhere."""


def environment(wheel: Path, devices: int = 2) -> dict[str, str]:
    """The environment of a process that has the CUDA wheel's vLLM and the fake CUDA."""
    environment = fake_cuda.environment(devices) | ENVIRONMENT
    environment[MARK] = str(wheel)
    tests = [Path(__file__).parents[1] / name for name in ("cuda_vllm", "fake_cuda", "vllm")]
    paths = [wheel, *tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return environment


def on_gpu(wheel: Path) -> dict[str, str]:
    """Variables of a process whose engines run on a GPU, with the vLLM of a folder."""
    return {**ON_GPU, MARK: str(wheel)}


def is_loaded() -> bool:
    """Whether this process was started so."""
    return MARK in os.environ and (fake_cuda.is_loaded() or torch.cuda.is_available())


def prepare() -> None:
    """Make vLLM find its platform and let its kernels compute; before the first engine."""
    import vllm.platforms

    vllm.platforms.builtin_platform_plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"
    if fake_cuda.is_loaded():
        _prepare_fake()
    import vllm.v1.worker.gpu_worker as gpu_worker

    # It imports all models, and warms kernels up that the interpreter and the bundle lack.
    gpu_worker.kernel_warmup = lambda worker: None


def _prepare_fake() -> None:
    import vllm.utils.torch_utils as torch_utils

    import compute

    register = torch_utils.direct_register_custom_op

    def noting(op_name: str, op_func: Any, *more: Any, **named: Any) -> None:
        library = named.get("target_lib")
        namespace = library.ns if library is not None else "vllm"
        compute.IN_PYTHON[f"{namespace}::{op_name}"] = op_func
        register(op_name, op_func, *more, **named)

    torch_utils.direct_register_custom_op = noting
    # Its kernels are not kept, and no backend that is chosen here calls them.
    flash_attention = "vllm.vllm_flash_attn._vllm_fa2_C"
    sys.modules[flash_attention] = types.ModuleType(flash_attention)
    compute.replace_triton()

    from vllm.distributed.device_communicators import cuda_wrapper

    import operators

    operators.install()
    for module in (torch.accelerator, torch.cuda):
        module.empty_cache = _after_streams(module.empty_cache)
    # vLLM opens the runtime library by its path, past the fake.
    runtime = cuda_wrapper.find_loaded_library("libcudart")
    cuda_wrapper.CudaRTLibrary.path_to_library_cache[runtime] = ctypes.CDLL(None)


class Untouched:
    """In place of `fake_cuda.Fake` on a GPU, whose driver is neither slowed down nor watched."""

    def delays(self, seed: int, longest: float) -> None:
        pass

    def copies_at(self, bytes_per_second: float) -> None:
        pass

    def violations(self) -> list[str]:
        return []

    def forget_violations(self) -> None:
        pass


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Kernels compute meanwhile, in the order of their streams. A GPU's do so anyway."""
    if not fake_cuda.is_loaded():
        yield
        return
    from compute import Compute

    with Compute():
        yield


def launched(function: Callable[..., None], name: str) -> Callable[..., None]:
    """``function``, which writes its results, as a kernel: on the fake one piece of work on the current stream."""
    if not fake_cuda.is_loaded():
        return function
    from compute import queued_function

    return queued_function(function, name)


def _after_streams(empty_cache: Callable[[], None]) -> Callable[[], None]:
    """``empty_cache`` when all streams have ended their work. It keeps Python's lock while the driver frees memory and
    waits for the streams, and the work of these streams needs that lock."""

    def emptied() -> None:
        torch.accelerator.synchronize()
        empty_cache()

    return emptied
