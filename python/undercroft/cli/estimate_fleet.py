"""``undercroft estimate --hosts``: many hosts behind a router, and the remote store that they share."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from undercroft import capacity
from undercroft.cli import arguments, output
from undercroft.cli.estimate_cases import case_of, tokens_of, warnings_of
from undercroft.cli.output import say
from undercroft.cli.size import Model
from undercroft.config import OPTIONS, Option
from undercroft.errors import ConfigError
from undercroft.estimate.fleet import Objects, Store, objects_in, objects_of, replay_fleet
from undercroft.estimate.replay import Tiers, reference
from undercroft.estimate.savings import Machine, remote_load_seconds
from undercroft.estimate.trace import Trace
from undercroft.units import format_size

ROUTERS = ("prefix", "random", "sticky")
REMOTE_RATE = 3 * 10**9
REMOTE_LATENCY_MS = 20.0
UNEVEN, UNEVEN_LEAST = 4, 10
"""A host that gets this multiple of its share of the requests, and this many percent of all, is warned of."""
_OF_HOSTS = ("remote_object", "remote_write", "remote_write_rate")
"""The engine's options for a host's writes to the store."""
_NEEDS_HOSTS = ("router", "remote", "remote_rate", "remote_latency", "store_rate", "store_requests")
_NEEDS_REMOTE = ("remote_rate", "remote_latency", "store_rate", "store_requests")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a fleet."""
    group = parser.add_argument_group("a fleet", "The sizes and rates above are those of each host.")
    group.add_argument(
        "--hosts", type=arguments.whole(1, 10_000), metavar="N", help="replay the trace on N hosts behind a router"
    )
    group.add_argument(
        "--router",
        choices=ROUTERS,
        help="how the router chooses a host: by the longest prefix that it has sent there, unless the host has too "
        "much to do; at random; or the same host for a session, or without sessions for a first block (prefix)",
    )
    group.add_argument(
        "--remote",
        type=arguments.sizes,
        metavar="SIZE[,SIZE]",
        help="sizes of a remote store that the hosts share; the estimate without one is always printed",
    )
    for option in OPTIONS:
        if option.name in _OF_HOSTS:
            group.add_argument(
                option.flag,
                type=_parsed(option),
                default=option.parse(option.default),
                metavar=option.type.upper(),
                help=f"{option.help} Allowed: {option.allowed}. ({option.default})",
            )
    group.add_argument(
        "--remote-rate",
        type=arguments.rate,
        metavar="SIZE/S",
        help=f"bytes that a host reads from the store in a second ({format_rate(REMOTE_RATE)}, of a network of "
        "25 Gbit/s)",
    )
    group.add_argument(
        "--remote-latency",
        type=arguments.number(0, 60_000),
        metavar="MS",
        help=f"milliseconds until the first byte of a hit arrives from the store ({REMOTE_LATENCY_MS:g})",
    )
    group.add_argument(
        "--store-rate",
        type=arguments.rate,
        metavar="SIZE/S",
        help="bytes that the store reads and writes in a second, for all hosts: tells how many hosts it carries",
    )
    group.add_argument(
        "--store-requests",
        type=arguments.whole(1, 10**9),
        metavar="N",
        help="requests that the store answers in a second, for all hosts: tells how many hosts it carries",
    )


def _parsed(option: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}. Allowed: {option.allowed}") from None

    return parse


def format_rate(rate: float) -> str:
    """Bytes a second for people, in the decimal units of networks."""
    unit, scale = next(((unit, of) for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if rate >= of), ("B", 1.0))
    return f"{rate / scale:.3g} {unit}/s"


def check(args: argparse.Namespace) -> None:
    """Refuse arguments that have no effect. Raises ConfigError."""

    def given(names: tuple[str, ...]) -> str | None:
        return next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None), None)

    if args.hosts is None and (name := given(_NEEDS_HOSTS)):
        raise ConfigError(f"{name} is for a fleet; give --hosts N")
    if args.remote is None and (name := given(_NEEDS_REMOTE)):
        raise ConfigError(f"{name} is about a remote store, and there is none; give --remote SIZE")


def run(args: argparse.Namespace, machine: Machine, trace: Trace, model: Model) -> int:
    """Replay the trace on the fleet for each size, and print the results."""
    if not trace.seconds:
        raise ConfigError(
            f"{args.trace}: all requests have the same timestamp, and a fleet needs times: for the rates of writes, "
            "the load of the hosts, and the store's requests a second"
        )
    latency_ms = REMOTE_LATENCY_MS if args.remote_latency is None else args.remote_latency
    machine = replace(machine, remote_read=args.remote_rate or REMOTE_RATE, remote_latency_s=latency_ms / 1e3)
    fleet = _Fleet(args, machine, trace, model, objects_of(trace, model.groups, args.remote_object))
    sizes = list(
        itertools.product(
            dict.fromkeys(args.host_memory), dict.fromkeys(args.disk or [0]), dict.fromkeys([0, *(args.remote or [])])
        )
    )
    hidden = args.json or not sys.stderr.isatty()
    total = len(sizes) * len(trace.requests)
    with tqdm(desc="replay", unit=" requests", total=total, disable=hidden, leave=False) as bar:
        cases = [fleet.case(of, bar.update) for of in sizes]
    fleet.judge(cases)
    found = fleet.report(cases)
    if args.json:
        output.print_json(found)
    else:
        _print(found)
    return 0


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The parts that all sizes share."""

    args: argparse.Namespace
    machine: Machine
    trace: Trace
    model: Model
    objects: Objects

    def case(self, sizes: tuple[int, int, int], progress: Callable[[int], object]) -> dict[str, Any]:
        """The figures of hosts and a store of these sizes: host memory, disk, store."""
        args, trace, groups = self.args, self.trace, self.model.groups
        host, disk, remote = sizes
        tokens = tokens_of(trace, self.model, "host", host), tokens_of(trace, self.model, "disk", disk)
        second_touch = args.disk_admission == "second_touch"
        write_tokens_s = (self.machine.disk_write or 0) * tokens[1] / disk if disk else 0.0
        found = replay_fleet(
            trace,
            Tiers(*tokens, second_touch, write_tokens_s),
            Store(
                objects_in(remote, self.objects),
                args.remote_write,
                args.remote_write_rate / self.objects.size * self.objects.tokens,
            ),
            self.objects,
            args.hosts,
            args.router or ROUTERS[0],
            progress,
        )
        outcome, load = found.outcome, found.store
        # A day's writes and the disk's time are those of one host.
        seconds = trace.seconds * args.hosts
        case = case_of(outcome, seconds, self.model, self.machine, (host, tokens[0]), (disk, tokens[1]))
        case["warnings"] = warnings_of(case, self.machine, capacity.token_bytes(groups), args.disk_admission)
        if args.hosts > 1 and found.busiest_percent > max(UNEVEN_LEAST, 100 * UNEVEN / args.hosts):
            case["warnings"].append(
                f"one host gets {found.busiest_percent:.0f} % of the requests: the router does not spread this trace"
            )
        return case | {
            "remote": remote,
            "remote_hit_percent": 100 * outcome.remote_tokens / max(1, outcome.tokens),
            "remote_hit_tokens": outcome.remote_tokens,
            "remote_load_seconds": remote_load_seconds(outcome, groups, self.machine),
            "remote_requests": load.requests,
            "remote_requests_per_s": load.requests / trace.seconds,
            "remote_peak_requests_per_s": load.peak_requests_s,
            "remote_read_bytes": load.read_bytes,
            "remote_write_bytes": load.write_bytes,
            "remote_bytes_per_s": (load.read_bytes + load.write_bytes) / trace.seconds,
            "remote_peak_bytes_per_s": load.peak_bytes_s,
            "remote_evicted_objects": load.evicted_objects,
            "remote_dropped_objects": load.dropped_objects,
            "busiest_host_percent": found.busiest_percent,
        }

    def judge(self, cases: list[dict[str, Any]]) -> None:
        """Add to each case with a store whether it pays, beside the same hosts without one, and how many it carries."""
        alone = {(case["host_memory"], case["disk"]): case for case in cases if not case["remote"]}
        for case in cases:
            more = case["hit_tokens"] - alone[case["host_memory"], case["disk"]]["hit_tokens"]
            load_s, rate = case["remote_load_seconds"], self.machine.prefill_tokens
            case["added_hit_tokens"] = more if case["remote"] else None
            case["pays"] = more / rate > load_s if case["remote"] and rate else None
            case["break_even_prefill_rate"] = max(0, more) / load_s if case["remote"] and load_s else None
            case["hosts_per_store"] = self._carried(case) if case["remote"] else None

    def _carried(self, case: dict[str, Any]) -> int | None:
        """The hosts that one store carries, if each of them asks as much as those of the replay."""
        limits = (
            (self.args.store_requests, case["remote_peak_requests_per_s"]),
            (self.args.store_rate, case["remote_peak_bytes_per_s"]),
        )
        return min((int(self.args.hosts * limit / peak) for limit, peak in limits if limit and peak), default=None)

    def report(self, cases: list[dict[str, Any]]) -> dict[str, Any]:
        """All figures as one object."""
        trace = self.trace
        everything = reference(trace, trace.unique_blocks * trace.block_tokens)
        return {
            "requests": len(trace.requests),
            "prompt_tokens": trace.tokens,
            "seconds": trace.seconds,
            "trace_block_tokens": trace.block_tokens,
            "token_bytes": capacity.token_bytes(self.model.groups),
            "hosts": self.args.hosts,
            "router": self.args.router or ROUTERS[0],
            "object_bytes": self.objects.size,
            "object_tokens": self.objects.tokens,
            "prefill_rate": self.machine.prefill_tokens,
            "remote_rate": self.machine.remote_read,
            "remote_latency_seconds": self.machine.remote_latency_s,
            "unlimited_hit_percent": everything.optimum_hit_percent,
            "cases": cases,
        }


def _print(found: dict[str, Any]) -> None:
    say(
        f"{found['requests']:,} requests, {found['prompt_tokens']:,} prompt tokens in "
        f"{output.age_text(found['seconds'])}; blocks of {found['trace_block_tokens']} tokens"
    )
    say(
        f"{output.count(found['hosts'], 'host')}, router {found['router']}; objects of the store have "
        f"{found['object_tokens']:,.0f} tokens, {format_size(found['object_bytes'])}"
    )
    say(f"one cache without limits for all hosts would find {found['unlimited_hit_percent']:.1f} %")
    say()
    output.print_table(
        (
            *("host", "disk", "store", "hit %", "of host", "of disk", "of store", "net saved"),
            *("store reads", "store writes", "requests/s", "busiest minute"),
        ),
        [_row(case) for case in found["cases"]],
    )
    for case in found["cases"]:
        sizes = ", ".join(format_size(case[tier]) for tier in ("host_memory", "disk", "remote") if case[tier])
        for warning in case["warnings"]:
            say(f"warning: {sizes}: {warning}")
    for case in found["cases"]:
        if case["remote"]:
            say()
            say(_payment(case, found))
            say(_carriage(case, found))


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    net, remote = case["net_seconds_saved"], case["remote"]
    peak = f"{case['remote_peak_requests_per_s']:,.1f}/s, {format_rate(case['remote_peak_bytes_per_s'])}"
    return (
        format_size(case["host_memory"]),
        format_size(case["disk"]) if case["disk"] else "-",
        format_size(remote) if remote else "-",
        *(f"{case[f'{tier}hit_percent']:.1f}" for tier in ("", "host_", "disk_", "remote_")),
        "-" if net is None else f"{net:,.0f} s",
        format_size(case["remote_read_bytes"]) if remote else "-",
        format_size(case["remote_write_bytes"]) if remote else "-",
        f"{case['remote_requests_per_s']:,.1f}" if remote else "-",
        peak if remote else "-",
    )


def _payment(case: dict[str, Any], found: dict[str, Any]) -> str:
    """Whether a store pays, in a sentence."""
    more, rate = case["added_hit_tokens"], found["prefill_rate"]
    points = 100 * more / max(1, found["prompt_tokens"])
    store = f"A store of {format_size(case['remote'])}"
    if more <= 0:
        return f"{store} does not pay: it adds no hits to those of the hosts' own tiers."
    loads = (
        f"it adds {points:.1f} points of hits, {more:,} tokens, and its loads take "
        f"{case['remote_load_seconds']:,.0f} s at "
        f"{format_rate(found['remote_rate'])} (--remote-rate) and {1e3 * found['remote_latency_seconds']:g} ms "
        "(--remote-latency) a request"
    )
    if rate is None:
        return f"{store} pays if a host computes less than {case['break_even_prefill_rate']:,.0f} tokens/s: {loads}."
    verb = "pays" if case["pays"] else "does not pay"
    return f"{store} {verb}: {loads}, while computing these tokens takes {more / rate:,.0f} s at {rate:,} tokens/s."


def _carriage(case: dict[str, Any], found: dict[str, Any]) -> str:
    """How many hosts a store carries, in a sentence."""
    hosts = found["hosts"]
    busiest = (
        f"In the busiest minute {output.count(hosts, 'host')} together send {case['remote_peak_requests_per_s']:,.1f} "
        f"requests/s and move {format_rate(case['remote_peak_bytes_per_s'])}"
    )
    carried = case["hosts_per_store"]
    if carried is None:
        return f"{busiest}; --store-requests and --store-rate tell how many hosts a store carries."
    return f"{busiest}: at as much a host, this store carries {output.count(carried, 'host')}."
