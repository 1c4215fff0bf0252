"""``undercroft bench serve``: time to first token of prompts that a running vLLM sees for the first time, and again."""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from undercroft.cli.output import CommandError
from undercroft_bench.vllm_client import Answer, VllmClient

BAR = 40
_WORDS = ("barrel", "cellar", "ledger", "harbour", "lantern", "orchard", "quarry", "ribbon", "saddle", "timber")


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of the measurement."""

    prompts: int
    prompt_tokens: int
    max_tokens: int
    fill_tokens: int | None
    """Tokens of other prompts that displace the device's cache, where it cannot be emptied; None: as many as it
    holds."""


def measure(client: VllmClient, plan: Plan) -> dict[str, Any]:
    """Ask each prompt cold, let the device forget it, and ask it again. Raises CommandError."""
    # No text of an earlier run: it would be cached.
    texts = random.Random()
    model = client.model()
    prompts = [text_of(client, model, plan.prompt_tokens, texts) for _ in range(plan.prompts)]
    with progress("warm up", 1) as bar:
        # Delays of a server's first requests alone are not part of "cold".
        client.complete(model, text_of(client, model, plan.prompt_tokens, texts), 2)
        bar.update()
    cold = _ask(client, model, prompts, plan, "cold")
    device = _ask(client, model, prompts[-1:], plan, "from the device")
    filled = _forget(client, model, plan, texts)
    warm = _ask(client, model, prompts, plan, "warm")
    rows = [row("cold", cold), row("device", device), row("warm", warm)]
    medians = [row["ttft_p50_ms"] for row in rows]
    return {
        "model": model,
        "prompts": plan.prompts,
        "prompt_tokens": round(statistics.mean(answer.prompt_tokens for answer in cold)),
        "device_cache": "emptied" if filled is None else "displaced by other prompts",
        "fill_tokens": filled,
        "speedup": medians[0] / medians[2],
        "cases": rows,
    }


def text_of(client: VllmClient, model: str, tokens: int, texts: random.Random) -> str:
    """A new text of about so many tokens."""
    words = [f"{texts.choice(_WORDS)} {texts.randrange(10**6)}" for _ in range(64)]
    per_word = client.count_tokens(model, " ".join(words)) / len(words)
    return " ".join(f"{texts.choice(_WORDS)} {texts.randrange(10**6)}" for _ in range(max(1, int(tokens / per_word))))


def _ask(client: VllmClient, model: str, prompts: list[str], plan: Plan, name: str) -> list[Answer]:
    answers = []
    with progress(name, len(prompts)) as bar:
        for prompt in prompts:
            answers.append(client.complete(model, prompt, plan.max_tokens))
            bar.update()
    return answers


def _forget(client: VllmClient, model: str, plan: Plan, texts: random.Random) -> int | None:
    """Let the device forget the prompts. None if its cache was emptied, else the tokens that took their place."""
    if client.reset_device_cache():
        return None
    wanted = plan.fill_tokens if plan.fill_tokens is not None else client.device_tokens()
    if wanted is None:
        raise CommandError(
            "the server does not say how much its device's cache holds, and has no endpoint to empty it "
            "(VLLM_SERVER_DEV_MODE=1); give --fill-tokens"
        )
    done = 0
    with progress("displacing the device's cache", wanted) as bar:
        while done < wanted:
            answer = client.complete(model, text_of(client, model, plan.prompt_tokens, texts), 1)
            done += answer.prompt_tokens
            bar.update(answer.prompt_tokens)
    return done


def row(name: str, answers: list[Answer]) -> dict[str, Any]:
    """Median and 90th percentile of the times, and the share of cached tokens."""
    times = sorted(1e3 * answer.ttft_s for answer in answers)
    cached = [answer.cached_tokens for answer in answers]
    known = [tokens for tokens in cached if tokens is not None]
    share = sum(known) / max(1, sum(answer.prompt_tokens for answer in answers))
    return {
        "case": name,
        "ttft_p50_ms": statistics.median(times),
        "ttft_p90_ms": times[min(len(times) - 1, int(0.9 * len(times)))],
        "cached_percent": 100 * share if len(known) == len(cached) else None,
    }


def chart(rows: list[dict[str, Any]]) -> list[str]:
    """A bar for the median of each case."""
    longest = max(row["ttft_p50_ms"] for row in rows)
    bars = [(row["case"], row["ttft_p50_ms"], "#" * max(1, round(BAR * row["ttft_p50_ms"] / longest))) for row in rows]
    return [f"{name:<8}{median:>10.1f} ms  {bar}" for name, median, bar in bars]


def progress(name: str, total: int) -> tqdm[Any]:
    """Progress, on a terminal."""
    return tqdm(desc=name, total=total, leave=False, disable=not sys.stderr.isatty())
