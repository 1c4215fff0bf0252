"""The planner's estimates for people: the least number of tokens whose load from a tier saves time."""

from __future__ import annotations

from typing import Any

from undercroft.cli import engines
from undercroft.units import format_size

LENGTHS = (512, 2048, 8192, 32768, 131072)
_SLACK = 0.9
"""A load must take less than this part of the time of computing. The planner has the same constant."""


def of_remote(stats: dict[str, Any]) -> dict[str, Any]:
    """The statistics with the values of the remote store in place of the disk's."""
    names = ("bytes_per_s", "latency_seconds")
    return stats | {f"plan_disk_{name}": stats.get(f"plan_remote_{name}", 0) for name in names}


def compute_s(stats: dict[str, Any], tokens: int) -> float:
    """Seconds of computing a prompt. The time of a token grows with its position."""
    first: float = 1.0 / stats["plan_prefill_tokens_per_s"]
    later: float = 1.0 / max(1, stats["plan_prefill_tokens_per_s_32k"])
    return tokens * first + (later - first) / 32768 * tokens * tokens / 2


def load_s(stats: dict[str, Any], tokens: int) -> float:
    """Seconds of reading a prompt from an idle disk and copying it to the device."""
    size = tokens * stats["plan_bytes_per_token"]
    copy: float = size / stats["plan_copy_bytes_per_s"] if stats["plan_copy_bytes_per_s"] else 0.0
    latency: float = stats["plan_disk_latency_seconds"] + stats["plan_copy_latency_seconds"]
    return latency + copy + float(size / stats["plan_disk_bytes_per_s"])


def is_known(stats: dict[str, Any]) -> bool:
    """Whether enough steps and reads were measured."""
    needed = ("plan_disk_bytes_per_s", "plan_prefill_tokens_per_s", "plan_bytes_per_token")
    return all(stats.get(name) for name in needed)


def loaded_lengths(stats: dict[str, Any]) -> list[int]:
    """The lengths of prompts that the planner reads from an idle disk."""
    return [tokens for tokens in LENGTHS if load_s(stats, tokens) < _SLACK * compute_s(stats, tokens)]


def sentence(stats: dict[str, Any], tier: str = "disk") -> str:
    """One sentence about the disk or the remote store; empty before enough was measured."""
    if not is_known(stats):
        return ""
    even = 8192 * stats["plan_bytes_per_token"] / compute_s(stats, 8192)
    loaded = loaded_lengths(stats)
    what = (
        f"prefixes of {loaded[0]} tokens and more are loaded"
        if loaded == list(LENGTHS[len(LENGTHS) - len(loaded) :]) and loaded
        else f"prefixes of {', '.join(map(str, loaded))} tokens are loaded"
        if loaded
        else f"prefixes on the {tier} are computed"
    )
    return (
        f"{tier} {format_size(stats['plan_disk_bytes_per_s'])}/s; this model breaks even at {format_size(int(even))}/s "
        f"for 8192 tokens: {what}"
    )


def of_tiers(stats: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Each tier that was measured: its name, the sentence about it, and the values for its table."""
    tiers = (("disk", stats), ("remote store", of_remote(stats)))
    return [(tier, text, of) for tier, of in tiers if (text := sentence(of, tier))]


HEADER = ("prompt tokens", "computing", "loading", "break-even rate", "decision")


def table(stats: dict[str, Any]) -> list[tuple[str, ...]]:
    """For each length of a prompt: the times of computing and of loading, the rate of the disk at which these times are
    equal, and the decision if nothing else is read."""
    loaded = loaded_lengths(stats)
    return [
        (
            str(tokens),
            f"{compute_s(stats, tokens) * 1e3:.0f} ms",
            f"{load_s(stats, tokens) * 1e3:.0f} ms",
            f"{format_size(int(tokens * stats['plan_bytes_per_token'] / compute_s(stats, tokens)))}/s",
            "load" if tokens in loaded else "compute",
        )
        for tokens in LENGTHS
    ]


def of_running(disk_bytes_per_s: float | None = None) -> list[dict[str, str]]:
    """The table of this user's first engine with enough measurements, for its own disk or a disk of the given rate."""
    other = {} if disk_bytes_per_s is None else {"plan_disk_bytes_per_s": disk_bytes_per_s}
    for engine in engines.all_of_user():
        stats = engine["stats"] | other
        if is_known(stats):
            return [dict(zip(HEADER, row, strict=True)) for row in table(stats)]
    return []
