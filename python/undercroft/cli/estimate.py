"""``undercroft estimate``: the savings of a cache of some size on a trace."""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from undercroft import capacity
from undercroft.cli import arguments, estimate_fleet, output
from undercroft.cli.estimate_cases import case_of, machine_of, tokens_of, warnings_of
from undercroft.cli.output import say
from undercroft.cli.size import Model, read_model
from undercroft.config import OPTIONS
from undercroft.estimate.replay import Outcome, Tiers, reference, replay
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
    option = next(option for option in OPTIONS if option.name == "disk_admission")
    choices = ("all", "second_touch")
    parser.add_argument(option.flag, choices=choices, default=option.default, help=f"{option.help} (%(default)s)")
    estimate_fleet.add_arguments(parser)
    arguments.add_model(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay the trace for each pair of sizes, and print the results."""
    estimate_fleet.check(args)
    machine = machine_of(args)
    trace = read(Path(args.trace), args.trace_block)
    model = read_model(args.model, args)
    if args.hosts:
        return estimate_fleet.run(args, machine, trace, model)
    pairs = list(itertools.product(dict.fromkeys(args.host_memory), dict.fromkeys([0, *args.disk])))
    capacities = [
        (tokens_of(trace, model, "host", host), tokens_of(trace, model, "disk", disk)) for host, disk in pairs
    ]
    hidden = args.json or not sys.stderr.isatty()
    steps = (len(pairs) + CURVE_POINTS) * len(trace.requests)
    with tqdm(desc="replay", unit=" requests", total=steps, disable=hidden, leave=False) as bar:

        def replayed(host_tokens: int, disk_tokens: int = 0, write_tokens_s: float = 0.0) -> Outcome:
            second_touch = args.disk_admission == "second_touch"
            tiers = Tiers(host_tokens, disk_tokens, second_touch, write_tokens_s)
            return replay(trace, tiers, bar.update)

        cases = []
        for (host, disk), (host_tokens, disk_tokens) in zip(pairs, capacities, strict=True):
            write_tokens_s = (machine.disk_write or 0) * disk_tokens / disk if disk else 0.0
            outcome = replayed(host_tokens, disk_tokens, write_tokens_s)
            case = case_of(outcome, trace.seconds, model, machine, (host, host_tokens), (disk, disk_tokens))
            cases.append(case | asdict(reference(trace, host_tokens + disk_tokens)))
        points = [(tokens, replayed(tokens)) for tokens in _curve_tokens(trace)]
    for case in cases:
        case["warnings"] = warnings_of(case, machine, capacity.token_bytes(model.groups), args.disk_admission)
    unlimited = case_of(points[-1][1], trace.seconds, model, machine, (None, None), (0, 0))
    unlimited |= dict.fromkeys(("lru_hit_percent", "optimum_hit_percent"), unlimited["hit_percent"])
    curve = [{"tokens": tokens, "hit_percent": outcome.hit_percent} for tokens, outcome in points]
    found = _report(trace, model, machine.prefill_tokens, cases, unlimited, curve)
    if args.json:
        output.print_json(found)
    else:
        _print(found, model)
    return 0


def _curve_tokens(trace: Trace) -> list[int]:
    """Capacities of the chart: each is half of the next, and the last holds all blocks."""
    most = (trace.unique_blocks + 64) * trace.block_tokens
    return sorted({max(most >> step, 64 * trace.block_tokens) for step in range(CURVE_POINTS)})


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
        (
            *("host", "disk", "hit %", "of host", "of disk", "LRU", "optimum"),
            *("prefill avoided", "net saved", "written a day"),
        ),
        rows,
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
        f"{case['lru_hit_percent']:.1f}",
        f"{case['optimum_hit_percent']:.1f}",
        "-" if avoided is None else f"{avoided:,.0f} s",
        "-" if net is None else f"{net:,.0f} s",
        "-" if daily is None or not case["disk"] else format_size(daily),
    )
