"""How the turn of a conversation ended, by which the engine learns when the conversation comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MIX = 0x9E3779B1


def turn_end(request: Request) -> int:
    """The same 32-bit number for all finished requests with the same last two tokens; 0 for one that was stopped short.

    These tokens say whether the model calls a tool, whatever its format: `</tool_call><|im_end|>` of Qwen,
    `<|eom_id|>` of Llama, `<|call|>` of gpt-oss.
    """
    tokens = request.output_token_ids
    if request.status.name != "FINISHED_STOPPED" or not len(tokens):
        return 0
    number = 0
    for token in tokens[-2:]:
        number = (number ^ token) * _MIX & 0xFFFFFFFF
        number ^= number >> 15
    return number or 1
