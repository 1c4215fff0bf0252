"""In place of vLLM's compiled extension, which is too large for the bundle: lies there as `vllm/_C_stable_libtorch.py`.

An engine with Triton's attention and PyTorch's own operators calls two functions of the extension. Some more operators
are named when layers are made, and never called.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import torch

ONLY_NAMED = (
    *("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_new", "gelu_fast", "gelu_quick"),
    *("rms_norm", "fused_add_rms_norm", "rotary_embedding"),
)
ASKED = (
    *("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_scaled_mm_supports_fp4"),
    *("cutlass_group_gemm_supported",),
)
"""Questions whether a kernel can run here."""


class _OnTheDevice:
    """Pinned host memory as the device's: both have the same addresses."""

    def __init__(self, host: torch.Tensor) -> None:
        size = host.numel() * host.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def _view(host: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(_OnTheDevice(host), device="cuda").view(host.dtype).view(host.shape)


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the bundle has no compiled operators of vLLM")


def _no(*_: Any) -> bool:
    return False


operators: Any = torch.ops._C
operators.get_cuda_view_from_cpu_tensor = _view
# A graph in pieces then keeps the memory between its pieces for itself.
operators.weak_ref_tensor = lambda tensor: tensor
for name in ONLY_NAMED:
    setattr(operators, name, _refuse)
for name in ASKED:
    setattr(operators, name, _no)

# The compiler names more operators, and drafts import it for a name that nothing is compiled under.
compiler: Any = types.ModuleType("vllm.compilation.backends")
compiler.model_tag = "backbone"
compiler.set_model_tag = lambda *_, **__: contextlib.nullcontext()
sys.modules[compiler.__name__] = compiler
