"""The common parts of the estimates of one host and of a fleet: rates of the machine, capacities, figures of a case."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from undercroft import capacity
from undercroft.cli.size import Model
from undercroft.errors import ConfigError, cause
from undercroft.estimate.replay import BLOCKS_MIN, Outcome
from undercroft.estimate.savings import Machine, savings
from undercroft.estimate.trace import Trace
from undercroft.units import format_size


def machine_of(args: argparse.Namespace) -> Machine:
    """The rates that the arguments give. Raises ConfigError."""
    given = [f"--{verb}-rate" for verb in ("read", "write") if getattr(args, f"{verb}_rate")]
    if args.disk_rates and given:
        raise ConfigError(f"--disk-rates and {given[0]} name the same rate; give one of them")
    given += ["--disk-rates"] if args.disk_rates else []
    if given and not any(args.disk):
        raise ConfigError(f"{given[0]} is the rate of a disk, and --disk names none; give --disk SIZE")
    rates = {"read": args.read_rate, "write": args.write_rate}
    if args.disk_rates:
        rates = _measured(Path(args.disk_rates))
    return Machine(args.prefill_rate, args.copy_rate, rates["read"], rates["write"], args.disk_writes_per_day)


def _measured(path: Path) -> dict[str, int]:
    """Bytes a second of reads and writes that `undercroft bench disk --json` has measured."""
    where = f"--disk-rates {path}"
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: {cause(error)}; expected a file with the output of undercroft bench disk --json"
        ) from None
    rates = {}
    for verb in ("read", "write"):
        name = f"{verb}_gbps"
        value = measured.get(name) if isinstance(measured, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(
                f"{where}: {name} is {value!r}, and must be a number above 0 (GB a second), as in the output of "
                "undercroft bench disk --json"
            )
        rates[verb] = max(1, int(value * 1e9))
    return rates


def tokens_of(trace: Trace, model: Model, tier: str, size: int) -> int:
    """The tokens that a tier of this size holds; 0 for none. Raises ConfigError if they are too few for a replay."""
    tokens = capacity.tokens_in(size, model.groups) if size else 0
    if size and tokens < BLOCKS_MIN * trace.block_tokens:
        raise ConfigError(
            f"{format_size(size)} for the {tier} tier holds {tokens:,} tokens of this model, and the replay needs "
            f"{BLOCKS_MIN} blocks of {trace.block_tokens} tokens; give more"
        )
    return tokens


def case_of(
    outcome: Outcome,
    seconds: float,
    model: Model,
    machine: Machine,
    host: tuple[int | None, int | None],
    disk: tuple[int, int],
) -> dict[str, Any]:
    """The figures of one replay of ``seconds``; ``host`` and ``disk`` are the bytes and tokens of the tiers."""
    return {
        "host_memory": host[0],
        "disk": disk[0],
        "host_capacity_tokens": host[1],
        "disk_capacity_tokens": disk[1],
        "hit_percent": outcome.hit_percent,
        "host_hit_percent": 100 * outcome.host_tokens / max(1, outcome.tokens),
        "disk_hit_percent": 100 * outcome.disk_tokens / max(1, outcome.tokens),
        "hit_tokens": outcome.hit_tokens,
    } | asdict(savings(outcome, model.groups, *disk, seconds, machine))


def warnings_of(case: dict[str, Any], machine: Machine, token_bytes: float, admission: str) -> list[str]:
    """The reasons why the disk of a case is not the right one."""
    found = []
    cure = "" if admission == "second_touch" else "; --disk-admission second_touch writes less"
    dropped, a_day, busy = case["disk_dropped_bytes"], case["disk_writes_per_day"], case["disk_busy_percent"]
    share = 100 * dropped / max(1, dropped + case["disk_write_bytes"])
    if share >= 0.5:
        found.append(f"the disk has no time for {share:.0f} % of the writes, which are not made{cure}")
    if a_day is not None and a_day > machine.disk_writes_per_day:
        found.append(
            f"{a_day:.3g} times its size is written a day, and the disk is made for {machine.disk_writes_per_day:g} "
            f"(--disk-writes-per-day){cure}"
        )
    if busy is not None and busy > 100:
        found.append(f"reads and writes together need {busy:.0f} % of the disk's time")
    if case["disk"] and machine.prefill_tokens and machine.disk_read:
        # Each byte is read, and then copied.
        loaded = 1 / (1 / machine.disk_read + 1 / machine.copy)
        if loaded < machine.prefill_tokens * token_bytes:
            found.append(f"vLLM computes faster than the disk is loaded ({format_size(loaded)}/s): it saves no time")
    return found
