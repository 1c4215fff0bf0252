"""The kernels of latent attention (MLA) that are not Triton's, in PyTorch's operators.

FlashAttention, which vLLM calls for prompts, is neither on the fake nor in the bundle of `tools/gpu_day`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm import _custom_ops as operators
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.ops import merge_attn_states

from fake_device import launched

ARGUMENTS = {"attention_config": {"backend": "TRITON_MLA", "mla_prefill_backend": "CUSTOM"}}
"""Of an engine that is to use them."""


def attention(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    starts_of_keys: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    """Queries of several requests, one behind the other, over the keys and values of each."""
    request, here = _places(q, starts)
    its_request, there = _places(k, starts_of_keys)
    seen = request[:, None] == its_request
    if causal:
        seen &= there <= here[:, None]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    scores.masked_fill_(~seen, float("-inf"))
    lse.copy_(scores.logsumexp(-1))
    out.copy_(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()))


def _places(rows: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's request, and its place among the request's rows."""
    numbers = torch.arange(rows.shape[0], dtype=starts.dtype, device=starts.device)
    request = torch.searchsorted(starts[1:], numbers, right=True)
    return request, numbers - starts[request]


def write_kv(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, **_: Any
) -> None:
    """As `concat_and_cache_mla`. Rows without a slot go to block 0, which vLLM gives to no request."""
    slots, size = slot_mapping.long().clamp(min=0), kv_cache.shape[1]
    rows = torch.cat((kv_c, k_pe.view(k_pe.shape[0], -1)), -1)[: slots.shape[0]]
    kv_cache[slots // size, slots % size] = rows.to(kv_cache.dtype)


def read_kv(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor,
) -> None:
    """As `gather_and_maybe_dequant_cache`: the rows of several requests, one behind the other."""
    request, size = token_to_seq[:num_tokens].long(), src_cache.shape[1]
    numbers = torch.arange(num_tokens, device=request.device)
    place = numbers - cu_seq_lens[request] + seq_starts[request]
    dst[:num_tokens] = src_cache[block_table[request, place // size].long(), place % size]


_attend = launched(attention, "mla_prefill")


class Prefill(MLAPrefillBackend):
    """Attention of prompts, whose context in the cache has been read into rows."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_softmax_lse: bool, **_: Any
    ) -> Any:
        starts = self._prefill_metadata.query_start_loc
        found = self._attention(q, k, v, starts, starts, causal=True)
        return found if return_softmax_lse else found[0]

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attention(q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, causal=False)

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *starts: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        _attend(out, lse, q, k, v, *starts, self.scale, causal)
        return out, lse


def install() -> None:
    """Let vLLM call them, once the platform is found."""
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, f"{__name__}.{Prefill.__name__}")
    # In fewer bits tokens depend on how a prompt was cut.
    TritonMLABackend.supported_dtypes = [torch.float32]
    operators.concat_and_cache_mla = launched(write_kv, "concat_and_cache_mla")
    operators.gather_and_maybe_dequant_cache = launched(read_kv, "gather_and_maybe_dequant_cache")
    operators.merge_attn_states = launched(merge_attn_states._merge_attn_states_torch, "merge_attn_states")
