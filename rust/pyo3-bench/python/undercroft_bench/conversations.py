"""``undercroft bench serve --turns`` and ``--trace``: time to first token of requests that share prefixes, as chats do.

The prompts are token ids that this run draws at random, so that no earlier run has cached them.
"""

from __future__ import annotations

import random
from typing import Any

from undercroft.cli.output import CommandError
from undercroft.estimate.trace import Request, Trace
from undercroft_bench.serve import progress, row, text_of
from undercroft_bench.vllm_client import Answer, VllmClient

_POOL_TOKENS = 2_000
"""Tokens of the text from whose ids the prompts are drawn."""


def of_turns(conversations: int, prompt_tokens: int, turns: int) -> Trace:
    """Conversations that take turns: each asks once before any asks again, with a prompt that is longer by one part."""
    part = max(1, prompt_tokens // turns)
    order = [(turn, one) for turn in range(turns) for one in range(conversations)]
    requests = [
        Request(float(time), part * (turn + 1), turn + 1, [one * turns + old for old in range(turn + 1)], None)
        for time, (turn, one) in enumerate(order)
    ]
    return Trace(part, requests)


def measure(client: VllmClient, trace: Trace, requests: int, max_tokens: int) -> dict[str, Any]:
    """Ask the first requests of the trace, one after the other. Raises CommandError."""
    model, longest = client.model(), client.longest_request(max_tokens)
    prompts = _Prompts(client, model, trace.block_tokens)
    answers: dict[str, list[Answer]] = {"new": [], "returning": []}
    shown: set[int] = set()
    seen_tokens = shortened = 0
    chosen = trace.requests[:requests]
    with progress("requests", len(chosen)) as bar:
        for index, request in enumerate(chosen):
            tokens = request.tokens if longest is None else min(request.tokens, longest)
            shortened += tokens < request.tokens
            blocks = request.blocks[: tokens // trace.block_tokens]
            seen = next((at for at, block in enumerate(blocks) if block not in shown), len(blocks))
            shown.update(blocks)
            seen_tokens += seen * trace.block_tokens
            answer = client.complete(model, prompts.ids(blocks, tokens, index), max_tokens)
            answers["returning" if seen else "new"].append(answer)
            bar.update()
    asked = [answer for kind in answers.values() for answer in kind]
    total = sum(answer.prompt_tokens for answer in asked)
    return {
        "model": model,
        "requests": len(asked),
        "shortened_requests": shortened,
        "prompt_tokens": round(total / len(asked)),
        "seen_percent": 100 * seen_tokens / max(1, total),
        "cached_percent": row("all", asked)["cached_percent"],
        "cases": [row(name, kind) for name, kind in answers.items() if kind],
    }


class _Prompts:
    """Token ids for the blocks of a trace: equal for equal numbers, and different in each run."""

    def __init__(self, client: VllmClient, model: str, block_tokens: int) -> None:
        texts = random.Random()
        self._run = texts.random()
        self._pool = client.token_ids(model, text_of(client, model, _POOL_TOKENS, texts))
        if not self._pool:
            raise CommandError("/tokenize: the answer held no token ids")
        self._block_tokens = block_tokens

    def ids(self, blocks: list[int], tokens: int, request: int) -> list[int]:
        """A prompt of ``tokens``: these blocks, then ids that no other request has."""
        found = [one for block in blocks for one in self._draw(f"block {block}", self._block_tokens)]
        return found + self._draw(f"request {request}", tokens - len(found))

    def _draw(self, name: str, tokens: int) -> list[int]:
        return random.Random(f"{self._run} {name}").choices(self._pool, k=tokens)
