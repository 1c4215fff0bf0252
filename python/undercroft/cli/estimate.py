"""``undercroft estimate``: the savings of a cache of some size on a trace."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from undercroft import capacity
from undercroft.cli import arguments, output
from undercroft.cli.output import say
from undercroft.cli.size import Model, read_model
from undercroft.config import OPTIONS
from undercroft.errors import ConfigError, cause
from undercroft.estimate.replay import BLOCKS_MIN, Outcome, Tiers, replay
from undercroft.estimate.savings import Machine, savings
from undercroft.estimate.trace import Trace, read
from undercroft.units import format_size

CURVE_POINTS = 8
BAR = 40


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "estimate",
        parents=[shared],
        help="estimate the savings of a cache on a recorded trace",
        description="Replays a trace on the engine's own index and policies, without payloads. The trace is one that "
        "vLLM with undercroft has recorded (option record), or one in Mooncake's format.",
        epilog="example: undercroft estimate --trace requests.jsonl --model Qwen/Qwen3-8B "
        "--host-memory 32GiB,64GiB --disk 1TiB --disk-rates disk.json --prefill-rate 20000",
    )
    parser.add_argument("--trace", required=True, metavar="FILE", help="one JSON object a line, one line a request")
    parser.add_argument("--model", required=True, metavar="MODEL", help="as for undercroft size")
    parser.add_argument(
        "--host-memory", required=True, type=arguments.sizes, metavar="SIZE[,SIZE]", help="sizes of the host tier"
    )
    parser.add_argument(
        "--disk",
        type=arguments.sizes_or_zero,
        default=[],
        metavar="SIZE[,SIZE]",
        help="sizes of the disk tier, all directories; the estimate without a disk (0) is always printed",
    )
    parser.add_argument(
        "--disk-rates",
        metavar="FILE",
        help="rates of the disk: the output of undercroft bench disk --json. Writes beyond them are not made",
    )
    for verb in ("read", "write"):
        parser.add_argument(
            f"--{verb}-rate",
            type=arguments.rate,
            metavar="SIZE/S",
            help=f"bytes that the disk {verb}s in a second, instead of --disk-rates",
        )
    parser.add_argument(
        "--disk-writes-per-day",
        type=arguments.number(0.01, 1000),
        default=1.0,
        metavar="N",
        help="how many times a day the disk may be written as a whole, as its maker says (DWPD); more is warned of "
        "(1, as of most drives for servers)",
    )
    parser.add_argument(
        "--copy-rate",
        type=arguments.rate,
        default=20 * 10**9,
        metavar="SIZE/S",
        help="bytes that are copied from host memory to the device in a second (20GB, of PCIe 4.0 with 16 lanes)",
    )
    parser.add_argument(
        "--prefill-rate",
        type=arguments.whole(1, 10**9),
        metavar="TOKENS/S",
        help="prompt tokens that vLLM computes in a second: tells the time saved, and how fast loads must be",
    )
    parser.add_argument(
        "--trace-block",
        type=arguments.whole(1, 1 << 20),
        metavar="TOKENS",
        help="tokens of a block, if the trace does not say (512, as in Mooncake's)",
    )
    for name in ("eviction_policy", "disk_admission"):
        option = next(option for option in OPTIONS if option.name == name)
        choices = {"eviction_policy": ("lru", "leafhd"), "disk_admission": ("all", "second_touch")}[name]
        parser.add_argument(option.flag, choices=choices, default=option.default, help=f"{option.help} (%(default)s)")
    arguments.add_model(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay the trace for each pair of sizes, and print the results."""
    machine = _machine(args)
    trace = read(Path(args.trace), args.trace_block)
    model = read_model(args.model, args)
    pairs = list(itertools.product(dict.fromkeys(args.host_memory), dict.fromkeys([0, *args.disk])))
    capacities = [(_tokens(trace, model, "host", host), _tokens(trace, model, "disk", disk)) for host, disk in pairs]
    hidden = args.json or not sys.stderr.isatty()
    steps = (len(pairs) + CURVE_POINTS) * len(trace.requests)
    with tqdm(desc="replay", unit=" requests", total=steps, disable=hidden, leave=False) as bar:

        def replayed(host_tokens: int, disk_tokens: int = 0, write_tokens_s: float = 0.0) -> Outcome:
            second_touch = args.disk_admission == "second_touch"
            tiers = Tiers(host_tokens, disk_tokens, args.eviction_policy == "leafhd", second_touch, write_tokens_s)
            return replay(trace, tiers, bar.update)

        cases = []
        for (host, disk), (host_tokens, disk_tokens) in zip(pairs, capacities, strict=True):
            write_tokens_s = (machine.disk_write or 0) * disk_tokens / disk if disk else 0.0
            outcome = replayed(host_tokens, disk_tokens, write_tokens_s)
            cases.append(_case(outcome, trace, model, machine, (host, host_tokens), (disk, disk_tokens)))
        points = [(tokens, replayed(tokens)) for tokens in curve_tokens(trace)]
    for case in cases:
        case["warnings"] = _warnings(case, machine, capacity.token_bytes(model.groups), args.disk_admission)
    unlimited = _case(points[-1][1], trace, model, machine, (None, None), (0, 0))
    curve = [{"tokens": tokens, "hit_percent": outcome.hit_percent} for tokens, outcome in points]
    found = _report(trace, model, machine.prefill_tokens, cases, unlimited, curve)
    if args.json:
        output.print_json(found)
    else:
        _print(found, model)
    return 0


def _machine(args: argparse.Namespace) -> Machine:
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


def _tokens(trace: Trace, model: Model, tier: str, size: int) -> int:
    """The tokens that a tier of this size holds; 0 for none. Raises ConfigError if they are too few for a replay."""
    tokens = capacity.tokens_in(size, model.groups) if size else 0
    if size and tokens < BLOCKS_MIN * trace.block_tokens:
        raise ConfigError(
            f"{format_size(size)} for the {tier} tier holds {tokens:,} tokens of this model, and the replay needs "
            f"{BLOCKS_MIN} blocks of {trace.block_tokens} tokens; give more"
        )
    return tokens


def curve_tokens(trace: Trace) -> list[int]:
    """Capacities of the chart: each is half of the next, and the last holds all blocks."""
    most = (trace.unique_blocks + 64) * trace.block_tokens
    return sorted({max(most >> step, 64 * trace.block_tokens) for step in range(CURVE_POINTS)})


def _case(
    outcome: Outcome,
    trace: Trace,
    model: Model,
    machine: Machine,
    host: tuple[int | None, int | None],
    disk: tuple[int, int],
) -> dict[str, Any]:
    """The figures of one replay; ``host`` and ``disk`` are the bytes and tokens of the tiers."""
    return {
        "host_memory": host[0],
        "disk": disk[0],
        "host_capacity_tokens": host[1],
        "disk_capacity_tokens": disk[1],
        "hit_percent": outcome.hit_percent,
        "host_hit_percent": 100 * outcome.host_tokens / max(1, outcome.tokens),
        "disk_hit_percent": 100 * outcome.disk_tokens / max(1, outcome.tokens),
        "hit_tokens": outcome.host_tokens + outcome.disk_tokens,
    } | asdict(savings(outcome, model.groups, *disk, trace.seconds, machine))


def _warnings(case: dict[str, Any], machine: Machine, token_bytes: float, admission: str) -> list[str]:
    """The reasons why the disk of a case is not the right one."""
    found = []
    cure = "" if admission == "second_touch" else "; --disk-admission second_touch writes less"
    dropped, a_day, busy = case["disk_dropped_bytes"], case["disk_writes_per_day"], case["disk_busy_percent"]
    if dropped:
        share = 100 * dropped / (dropped + case["disk_write_bytes"])
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


def _report(
    trace: Trace,
    model: Model,
    rate: int | None,
    cases: list[dict[str, Any]],
    unlimited: dict[str, Any],
    curve: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "requests": len(trace.requests),
        "prompt_tokens": trace.tokens,
        "seconds": trace.seconds,
        "trace_block_tokens": trace.block_tokens,
        "recorded_hit_percent": trace.cached_percent,
        "token_bytes": capacity.token_bytes(model.groups),
        # A hit saves time if it is loaded faster than computed.
        "break_even_bytes_per_second": int(rate * capacity.token_bytes(model.groups)) if rate else None,
        "cases": cases,
        "unlimited": unlimited,
        "host_only": curve,
    }


def _print(found: dict[str, Any], model: Model) -> None:
    say(
        f"{found['requests']:,} requests, {found['prompt_tokens']:,} prompt tokens in "
        f"{output.age_text(found['seconds'])}; blocks of {found['trace_block_tokens']} tokens"
    )
    if found["recorded_hit_percent"] is not None:
        say(f"when it was recorded, {found['recorded_hit_percent']:.1f} % of the tokens were cached")
    say()
    rows = [_row(case) for case in [*found["cases"], found["unlimited"]]]
    output.print_table(
        ("host", "disk", "hit %", "of host", "of disk", "prefill avoided", "net saved", "written a day"), rows
    )
    for case in found["cases"]:
        for warning in case["warnings"]:
            say(f"warning: {format_size(case['host_memory'])}, {format_size(case['disk'])}: {warning}")
    if any(case["disk_hit_percent"] and case["load_seconds"] is None for case in found["cases"]):
        say("net saved is unknown without the disk's rates: give --disk-rates, or --read-rate")
    say()
    say("hit rate by the size of host memory alone:")
    each = capacity.boundary_bytes(model.groups) / capacity.BOUNDARY_TOKENS + found["token_bytes"]
    for point in found["host_only"]:
        bar = "#" * round(BAR * point["hit_percent"] / 100)
        say(f"{format_size(point['tokens'] * each):>10}  {point['hit_percent']:5.1f} %  {bar}")
    if found["break_even_bytes_per_second"] is not None:
        say()
        say(
            f"break-even: a hit is faster than computing where a tier is read at more than "
            f"{format_size(found['break_even_bytes_per_second'])}/s"
        )


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    daily = case["disk_write_bytes_per_day"]
    avoided, net = case["prefill_seconds_avoided"], case["net_seconds_saved"]
    return (
        "unlimited" if case["host_memory"] is None else format_size(case["host_memory"]),
        format_size(case["disk"]) if case["disk"] else "-",
        f"{case['hit_percent']:.1f}",
        f"{case['host_hit_percent']:.1f}",
        f"{case['disk_hit_percent']:.1f}",
        "-" if avoided is None else f"{avoided:,.0f} s",
        "-" if net is None else f"{net:,.0f} s",
        "-" if daily is None or not case["disk"] else format_size(daily),
    )
