"""The kernels of vLLM's attention on the CPU, for `compute`: plain and slow, over the device's memory."""

from __future__ import annotations

from typing import Any

import torch

from compute import REPLACED, queued_function


def attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    chunk_lookback: int = -1,
    **unused: Any,
) -> None:
    """As `unified_attention`: queries of several requests over the blocks of a paged KV cache."""
    assert causal
    for name in ("alibi_slopes", "output_scale", "sinks", "mm_prefix_range", "rswa_prefix_lens"):
        assert unused.get(name) is None, name
    size, repeats = k.shape[1], q.shape[1] // k.shape[2]
    for request, used in enumerate(seqused_k.tolist()):
        begin, end = cu_seqlens_q[request : request + 2].tolist()
        end = min(end, begin + used)  # a graph's batch may be larger than its requests
        if end <= begin:
            continue
        blocks = block_table[request, : -(-used // size)].long()
        keys = _rows(k, blocks, used, k_descale, request).repeat_interleave(repeats, 1)
        values = _rows(v, blocks, used, v_descale, request).repeat_interleave(repeats, 1)
        queries = q[begin:end].float()
        if q.element_size() == 1:
            assert q_descale is not None
            queries *= q_descale.flatten()[0]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        here, there = torch.arange(used - (end - begin), used)[:, None], torch.arange(used)[None]
        seen = there <= here
        if window_size[0] >= 0 and chunk_lookback >= 0:
            chunk = (1 + window_size[0]) // (chunk_lookback + 1)
            seen &= here // chunk - there // chunk <= chunk_lookback
        elif window_size[0] >= 0:
            seen &= there >= here - window_size[0]
        scores.masked_fill_(~seen, float("-inf"))
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)


def _rows(
    cache: torch.Tensor, blocks: torch.Tensor, used: int, descale: torch.Tensor | None, request: int
) -> torch.Tensor:
    # Elements of 8 bits are looked up as bytes: not every operator knows their types.
    bytes_of = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    rows = bytes_of[blocks].view(cache.dtype).reshape(-1, *cache.shape[2:])[:used].float()
    return rows if descale is None or cache.element_size() > 1 else rows * descale[request][None, :, None]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """As `reshape_and_cache_flash`: the new keys and values, each at its slot."""
    used = torch.nonzero(slot_mapping >= 0).flatten()
    slots, size = slot_mapping[used].long(), key_cache.shape[1]
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        new = rows[used]
        if cache.element_size() == 1:
            cache.view(torch.uint8)[slots // size, slots % size] = (new / scale).to(cache.dtype).view(torch.uint8)
        else:
            cache[slots // size, slots % size] = new.to(cache.dtype)


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv_states: torch.Tensor, **named: Any
) -> torch.Tensor:
    """As `causal_conv1d_fn`: a convolution along the new tokens of several requests, each with its state."""
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    def run(out: torch.Tensor, *arguments: Any, **named: Any) -> None:
        out.copy_(causal_conv1d_fn_cpu(*arguments, **named))

    named.pop("metadata", None)
    out = torch.empty_like(x)
    queued_function(run, "causal_conv1d")(out, x, weight, bias, conv_states, **named)
    return out


def _convolution_of_one(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """As `causal_conv1d_update`: one new token of each request."""
    begins, has_state = torch.arange(len(x) + 1), torch.ones(len(x), dtype=torch.bool)
    named = {"cache_indices": conv_state_indices.flatten(), "has_initial_state": has_state, "activation": activation}
    return _convolution(x.T, weight, bias, conv_state, query_start_loc=begins, **named).T


def _rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> None:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    out.copy_(y.to(x.dtype) * weight if weight is not None else y)


def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> None:
    residual.copy_(x.float() + residual.float())
    _rms_norm(x, residual.clone(), weight, eps)


def _vocab_parallel_embedding(
    out: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, begin: int, end: int, *_: int
) -> None:
    """The rows of the words ``begin`` to ``end`` that this rank has, and zeros for others."""
    mine = (ids >= begin) & (ids < end)
    out.copy_(weight[torch.where(mine, ids - begin, 0)] * mine[:, None])


def install() -> None:
    """Put them in the place of vLLM's, whose module is loaded by now."""
    from vllm.model_executor.layers.mamba import short_conv
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.sample.ops import topk_topp_sampler

    # Its kernel calls what the interpreter lacks.
    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    triton_attn.unified_attention = queued_function(attention, "unified_attention")
    triton_attn.triton_reshape_and_cache_flash = queued_function(write_kv, "reshape_and_cache_flash")
    short_conv.causal_conv1d_fn = _convolution
    short_conv.causal_conv1d_update = _convolution_of_one
    REPLACED["_C::rms_norm"] = _rms_norm
    REPLACED["_C::vocab_parallel_embedding"] = _vocab_parallel_embedding
    REPLACED["_C::fused_add_rms_norm"] = _fused_add_rms_norm
