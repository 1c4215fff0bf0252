"""What the rounds found: whether each answer is right and each hit is where its system claims it, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peers.measure import COMPUTED, TOKENS
from peers.systems import ALONE, DEVICE, DISK, HOST, RESTART, SYSTEMS, System

Round = dict[str, Any]
"""One line of the file of results: "system", "round", and what `measure` found or why it "failed"."""

HIT = 0.9
"""Share of a prompt's tokens: a wait for the disk may end before its last blocks."""
FROM_DISK, NOT_FROM_DISK = 0.9, 0.1
"""Share of the KV cache that the processes read from the disk: at least, where a hit is claimed there, and at most,
where it is claimed in memory."""
OWN = (ALONE.name, "embedded", "served")
"""Systems of which a missing hit, or a round that does not run, is an error. Of the others it is in the table."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer, or a hit, that is not what it must be."""

    system: str
    what: str


def wrong(rounds: Iterable[Round]) -> list[Wrong]:
    """Answers that differ from those that others, or the same system, gave to the same prompt, and missing hits."""
    known: dict[str, tuple[str, list[int]]] = {}
    found = []
    # The prompts that vLLM alone computes come first: the others are compared with them.
    for one in sorted((one for one in rounds if "failed" not in one), key=lambda one: one["system"] != ALONE.name):
        [system] = [system for system in SYSTEMS if system.name == one["system"]]
        for phase, measured in ((name, value) for name, value in one.items() if isinstance(value, dict)):
            for prompt, answer in measured.get("answers", {}).items():
                by, right = known.setdefault(prompt, (f"{one['system']}, {phase}", answer))
                if answer != right:
                    what = f"round {one['round']}, {phase}, prompt {prompt}: {answer}, but {right} of {by}"
                    found.append(Wrong(system.title, what))
            missing = missed(system, phase, measured) if "ms" in measured else ""
            if missing and (system.name in OWN or phase == COMPUTED):
                found.append(Wrong(system.title, f"round {one['round']}, {phase}: {missing}"))
    return found


def hits(measured: dict[str, Any]) -> int:
    """Prompts of which nearly all tokens were cached."""
    return sum(cached >= HIT * TOKENS for cached in measured["cached"])


def missed(system: System, phase: str, measured: dict[str, Any]) -> str:
    """What a phase lacks that its system claims, or has that nobody can have; "" if nothing."""
    if phase == COMPUTED and any(measured["cached"]):
        return f"{max(measured['cached'])} tokens of a new prompt were cached"
    if phase not in system.tiers:
        return ""
    if hits(measured) < len(measured["cached"]):
        return f"{min(measured['cached'])} of {TOKENS} tokens were cached"
    share = measured["from_disk"]
    if phase in (DEVICE, HOST) and share > NOT_FROM_DISK:
        return f"{share:.0%} of the KV cache were read from the disk"
    if phase in (DISK, RESTART) and share < FROM_DISK:
        return f"only {share:.0%} of the KV cache were read from the disk"
    return ""


COLUMNS = {
    COMPUTED: "cold",
    DEVICE: "on the device",
    HOST: "in host memory",
    DISK: "on disk",
    RESTART: "after a restart",
}
"""Milliseconds to the first token."""


def table(rounds: Sequence[Round]) -> list[str]:
    """A row of Markdown for each system that is in the rounds."""
    lines = [
        f"| | {', '.join(COLUMNS.values())} (ms) | new prompts, turns (a second) | processor, new prompt, turn (s) |",
        "| --- | --- | --- | --- |",
    ]
    for system in SYSTEMS:
        ours = [one for one in rounds if one["system"] == system.name]
        ran = [one for one in ours if "failed" not in one]
        if ran:
            lines.append(row(system, ran))
        elif ours:
            lines.append(f"| {system.title} | did not run: {ours[-1]['failed']} | | |")
    return lines


def row(system: System, ran: Sequence[Round]) -> str:
    """The medians of a system's rounds; in parentheses prompts that were computed, where it claims no hit."""
    times = []
    for phase in COLUMNS:
        # Each round has as many prompts.
        median = statistics.median(ms for one in ran for ms in one[phase]["ms"])
        if phase != COMPUTED and phase not in system.tiers:
            times.append(f"({median:.3g})")
            continue
        missing = any(missed(system, phase, one[phase]) for one in ran)
        asked = sum(len(one[phase]["ms"]) for one in ran)
        times.append(f"{median:.3g}" + f" [{sum(hits(one[phase]) for one in ran)} of {asked} hit]" * missing)
    rates = [1 / statistics.median(one[load]["each_s"] for one in ran) for load in ("new", "turns")]
    processor = [statistics.median(one[load]["processor_s"] for one in ran) for load in ("new", "turns")]
    name = f"{system.title}{version(ran)}"
    figures = ", ".join(f"{rate:.3g}" for rate in rates), ", ".join(f"{one:.2g}" for one in processor)
    return f"| {name} | {', '.join(times)} | {figures[0]} | {figures[1]} |"


def version(ran: Sequence[Round]) -> str:
    """Of the package that the row is about, if it is not of this checkout."""
    found = {name: value for one in ran for name, value in one["versions"].items() if name != "vLLM"}
    return "".join(f" {value}" for value in found.values())


def spread(rounds: Sequence[Round]) -> str:
    """How much the medians of the rounds differ, at most."""
    ratios = []
    for system in SYSTEMS:
        ran = [one for one in rounds if one["system"] == system.name and "failed" not in one]
        for phase in COLUMNS if len(ran) > 1 else ():
            medians = [one[phase]["median_ms"] for one in ran]
            ratios.append((max(medians) / min(medians), f"{system.title}, {COLUMNS[phase]}"))
    if not ratios:
        return "one round: no spread"
    ratio, where = max(ratios)
    middle = statistics.median(ratio for ratio, _ in ratios)
    return f"between rounds a median differs by {middle - 1:.0%} in the middle, at most by {ratio - 1:.0%} ({where})"


__all__ = ["OWN", "Round", "Wrong", "missed", "spread", "table", "wrong"]
