"""``undercroft estimate``: the savings of a cache of some size on a trace."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from undercroft import capacity
from undercroft.cli import arguments, output
from undercroft.cli.output import say
from undercroft.cli.size import Model, read_model
from undercroft.config import OPTIONS
from undercroft.estimate.replay import Outcome, Tiers, replay
from undercroft.estimate.trace import Trace, read
from undercroft.units import format_size

CURVE_POINTS = 8
BAR = 40
DAY_S = 86_400.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "estimate",
        parents=[shared],
        help="estimate the savings of a cache on a recorded trace",
        description="Replays a trace on the engine's own index and policies, without payloads. The trace is one that "
        "vLLM with undercroft has recorded (option record), or one in Mooncake's format.",
        epilog="example: undercroft estimate --trace requests.jsonl --model Qwen/Qwen3-8B "
        "--host-memory 32GiB,64GiB --disk 1TiB --prefill-rate 20000",
    )
    parser.add_argument("--trace", required=True, metavar="FILE", help="one JSON object a line, one line a request")
    parser.add_argument("--model", required=True, metavar="MODEL", help="as for undercroft size")
    parser.add_argument(
        "--host-memory", required=True, type=arguments.sizes, metavar="SIZE[,SIZE]", help="sizes of the host tier"
    )
    parser.add_argument(
        "--disk",
        type=arguments.sizes,
        default=[],
        metavar="SIZE[,SIZE]",
        help="sizes of the disk tier, all directories",
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
    trace = read(Path(args.trace), args.trace_block)
    model = read_model(args.model, args)
    pairs = list(itertools.product(args.host_memory, [0, *args.disk]))
    hidden = args.json or not sys.stderr.isatty()
    steps = (len(pairs) + CURVE_POINTS) * len(trace.requests)
    with tqdm(desc="replay", unit=" requests", total=steps, disable=hidden, leave=False) as bar:

        def replayed(host_tokens: int, disk_tokens: int) -> Outcome:
            second_touch = args.disk_admission == "second_touch"
            tiers = Tiers(host_tokens, disk_tokens, args.eviction_policy == "leafhd", second_touch)
            return replay(trace, tiers, bar.update)

        cases = [_case(trace, model, host, disk, args.prefill_rate, replayed) for host, disk in pairs]
        points = curve_tokens(trace)
        curve = [{"tokens": tokens, "hit_percent": replayed(tokens, 0).hit_percent} for tokens in points]
    found = _report(trace, model, args.prefill_rate, cases, curve)
    if args.json:
        output.print_json(found)
    else:
        _print(found, model)
    return 0


def curve_tokens(trace: Trace) -> list[int]:
    """Capacities of the chart: each is half of the next, and the last holds all blocks."""
    most = (trace.unique_blocks + 64) * trace.block_tokens
    return sorted({max(most >> step, 64 * trace.block_tokens) for step in range(CURVE_POINTS)})


def _case(trace: Trace, model: Model, host: int, disk: int, rate: int | None, replayed: Any) -> dict[str, Any]:
    host_tokens = capacity.tokens_in(host, model.groups)
    disk_tokens = capacity.tokens_in(disk, model.groups) if disk else 0
    outcome: Outcome = replayed(host_tokens, disk_tokens)
    hit = outcome.host_tokens + outcome.disk_tokens
    # The bytes that a tier of this size writes, with windows and states.
    written = outcome.disk_write_tokens * disk / disk_tokens if disk_tokens else 0.0
    return {
        "host_memory": host,
        "disk": disk,
        "host_capacity_tokens": host_tokens,
        "disk_capacity_tokens": disk_tokens,
        "hit_percent": outcome.hit_percent,
        "host_hit_percent": 100 * outcome.host_tokens / max(1, outcome.tokens),
        "disk_hit_percent": 100 * outcome.disk_tokens / max(1, outcome.tokens),
        "hit_tokens": hit,
        "prefill_seconds_saved": hit / rate if rate else None,
        "disk_write_bytes": int(written),
        "disk_write_bytes_per_day": int(written / trace.seconds * DAY_S) if trace.seconds else None,
    }


def _report(
    trace: Trace, model: Model, rate: int | None, cases: list[dict[str, Any]], curve: list[dict[str, Any]]
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
    rows = []
    for case in found["cases"]:
        daily, saved = case["disk_write_bytes_per_day"], case["prefill_seconds_saved"]
        rows.append(
            (
                format_size(case["host_memory"]),
                format_size(case["disk"]) if case["disk"] else "-",
                f"{case['hit_percent']:.1f}",
                f"{case['host_hit_percent']:.1f}",
                f"{case['disk_hit_percent']:.1f}",
                "-" if saved is None else f"{saved:,.0f} s",
                "-" if daily is None or not case["disk"] else format_size(daily),
            )
        )
    output.print_table(("host", "disk", "hit %", "of host", "of disk", "prefill saved", "written a day"), rows)
    say()
    say("hit rate by the size of host memory alone:")
    each = capacity.boundary_bytes(model.groups) / capacity.BOUNDARY_TOKENS + found["token_bytes"]
    for point in found["host_only"]:
        bar = "#" * round(BAR * point["hit_percent"] / 100)
        say(f"{format_size(point['tokens'] * each):>10}  {point['hit_percent']:5.1f} %  {bar}")
    if found["break_even_bytes_per_second"] is not None:
        say(
            f"\nbreak-even: a hit is faster than computing where a tier is read at more than "
            f"{format_size(found['break_even_bytes_per_second'])}/s"
        )
