"""Requests of every kind that the soak sends, and the answers that a vLLM without any cache gives to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from real_engine import Engine
from tiny_models import MODELS, Shape, make_llama, make_qwen3_next

SMALL = Shape(hidden=128, intermediate=256, layers=4, heads=4, kv_heads=4, head_dim=64)
"""A block of 32 tokens has 256 KiB, so small tiers overflow after some prompts."""


@dataclass(frozen=True)
class Kind:
    """A kind of model, and an engine in which requests compete for blocks."""

    model: Callable[[Path], Path]
    block: int
    """Tokens of a block."""
    blocks: int
    """Device blocks: fewer than the requests of a moment want."""
    items: int
    """How many different requests there are."""
    engine: dict[str, Any] = field(default_factory=dict)
    host_memory: str = "16MiB"
    disk_capacity: str = "64MiB"
    draft: str = ""
    """The model that drafts tokens."""
    samples: bool = True
    """Whether requests with a temperature and ``top_k`` may be sent: vLLM's rejection sampler fails with them on the
    CPU, and so does the seeded sampling of long prompts."""
    priorities: int = 1
    rounding: float = 0.01
    """How far log probabilities may be apart: how a prompt is cut into steps changes them."""


KINDS = {
    "llama": Kind(
        lambda root: make_llama(root / "soak_llama", SMALL),
        block=32,
        blocks=44,
        items=120,
        engine={"scheduling_policy": "priority"},
        priorities=3,
    ),
    "windows": Kind(
        lambda root: MODELS["gemma2"](root / "gemma2"), block=32, blocks=110, items=60, engine={"max_model_len": 1024}
    ),
    "states": Kind(
        lambda root: make_qwen3_next(root / "soak_qwen3_next", Shape(layers=2)),
        block=640,
        blocks=14,
        items=80,
        engine={"dtype": "bfloat16", "max_model_len": 1500, "max_num_seqs": 4, "block_size": None},
        host_memory="32MiB",
        disk_capacity="96MiB",
        samples=False,
        rounding=0.25,
    ),
    "drafts": Kind(
        lambda root: MODELS["llama"](root / "llama"), block=32, blocks=44, items=80, draft="eagle", samples=False
    ),
}


@dataclass(frozen=True)
class Item:
    """One request."""

    ids: list[int]
    sampling: dict[str, Any]
    salt: str | None

    @property
    def prompt(self) -> dict[str, Any]:
        """For vLLM."""
        return {"prompt_token_ids": self.ids} | ({"cache_salt": self.salt} if self.salt else {})

    def params(self, **changes: Any) -> Any:
        """For vLLM."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = {"temperature": 0, "detokenize": False, "ignore_eos": True} | self.sampling | changes
        return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **settings)


@dataclass(frozen=True)
class Answer:
    """The tokens of each sequence, and the log probability of each prompt token's candidates if it was asked for."""

    tokens: list[list[int]]
    prompt: list[dict[int, float] | None] | None

    @classmethod
    def of(cls, output: Any) -> Answer:
        """From vLLM's output."""
        logprobs = output.prompt_logprobs
        return cls(
            [list(one.token_ids) for one in sorted(output.outputs, key=lambda one: one.index)],
            logprobs and [at and {token: value.logprob for token, value in at.items()} for at in logprobs],
        )

    def differs(self, other: Answer, rounding: float) -> str:
        """The first difference in words; empty if there is none."""
        for at, (mine, its) in enumerate(zip(self.tokens, other.tokens, strict=True)):
            if mine != its:
                return f"sequence {at} is {mine}, and of vLLM alone {its}"
        if (self.prompt is None) != (other.prompt is None):
            return "one answer has no prompt_logprobs"
        for at, (mine_at, its_at) in enumerate(zip(self.prompt or [], other.prompt or [], strict=True)):
            for token, value in (mine_at or {}).items():
                if its_at and abs(its_at.get(token, value) - value) > rounding:
                    return f"prompt_logprobs at {at} are {mine_at}, and of vLLM alone {its_at}"
        return ""


def start(kind: Kind, root: Path, options: dict[str, Any] | None, *, plain: bool = False, **more: Any) -> Engine:
    """An engine with undercroft, or vLLM alone if there are no ``options``. ``plain``: also without a prefix cache and
    drafts, and with as many blocks as fit."""
    arguments: dict[str, Any] = {"max_model_len": 512, "block_size": kind.block, "max_num_seqs": 8} | kind.engine | more
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if "block_size" in arguments:
        # A prompt is cut into several steps.
        arguments["max_num_batched_tokens"] = 256
    if plain:
        return Engine(kind.model(root), None, enable_prefix_caching=False, **arguments)
    if kind.draft:
        drafts = {
            "method": kind.draft,
            "model": str(MODELS[kind.draft](root / kind.draft)),
            "num_speculative_tokens": 3,
        }
        arguments["speculative_config"] = drafts
    return Engine(kind.model(root), options, blocks=kind.blocks, **arguments)


def make_items(kind: Kind, chance: random.Random, count: int) -> list[Item]:
    """Prompts that share prefixes, of lengths around the ends of blocks, with every kind of sampling."""
    longest = kind.engine.get("max_model_len", 512)

    def tokens(number: int) -> list[int]:
        return [chance.randrange(3, 1000) for _ in range(number)]

    trunks = [tokens(longest) for _ in range(6)]
    ends = [1, 2] + [n * kind.block + more for n in (1, 2, 4) for more in (-1, 0, 1) if n * kind.block + more < longest]
    items = []
    for _ in range(count):
        length = chance.choice(ends) if chance.random() < 0.6 else chance.randrange(1, longest - 1)
        if chance.random() > 0.97:
            length = longest - 1
        ids = list(chance.choice(trunks)[:length])
        if chance.random() < 0.4 and length > 3:
            cut = chance.randrange(1, length)
            ids = ids[:cut] + tokens(length - cut)
        most = chance.choice([1, 1, 2, 5, 20, min(kind.block + 3, 35)])
        sampling = {"max_tokens": min(longest - length, most)} | _sampling(kind, chance)
        items.append(Item(ids, sampling, chance.choice([None] * 8 + ["x", "y"])))
    return items


def _sampling(kind: Kind, chance: random.Random) -> dict[str, Any]:
    """Settings whose answer does not depend on chance: the temperature does not matter with ``top_k`` of 1."""
    draw = chance.random()
    if draw < 0.12:
        return {"temperature": 0.8, "top_k": 1} if kind.samples else {}
    if draw < 0.22:
        return {"temperature": 0.7, "top_k": 1, "n": chance.choice([2, 3])} if kind.samples else {}
    if draw < 0.30:
        return {"prompt_logprobs": 1, "logprobs": 1}
    if draw < 0.36:
        return {"repetition_penalty": 1.3}
    if draw < 0.42:
        return {"stop_token_ids": [chance.randrange(3, 1000) for _ in range(80)], "min_tokens": 1}
    return {"logprobs": 2} if draw < 0.46 else {}


def answered(kind: Kind, root: Path, items: Sequence[Item]) -> list[tuple[Item, Answer]]:
    """The requests and what vLLM alone answers. An answer ends before the first token that rounding could decide, so a
    request whose first token is of that kind is left out."""
    alone = start(kind, root, None, plain=True, max_num_seqs=4, logprobs_mode="processed_logprobs")
    greedy = {"temperature": 0, "top_k": 0, "n": 1, "logprobs": 2}
    try:
        params = [one.params(**greedy) for one in items]
        outputs = alone.llm.generate([one.prompt for one in items], params, use_tqdm=False)
    finally:
        alone.close()
    pairs = []
    for item, output in zip(items, outputs, strict=True):
        if certain := _certain(output, kind.rounding):
            answer = Answer.of(output)
            tokens = [answer.tokens[0][:certain]] * item.sampling.get("n", 1)
            shorter = replace(item, sampling=item.sampling | {"max_tokens": certain})
            pairs.append((shorter, Answer(tokens, answer.prompt)))
    return pairs


def _certain(output: Any, rounding: float) -> int:
    """How many tokens come before the first whose rival is about as likely."""
    steps = output.outputs[0].logprobs
    for count, step in enumerate(steps):
        best, second = sorted((value.logprob for value in step.values()), reverse=True)[:2]
        if best - second <= rounding:
            return count
    return len(steps)
