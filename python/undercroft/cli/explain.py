"""``undercroft explain``: the tokens that the last requests found in the cache, and why no more."""

from __future__ import annotations

import argparse
from typing import Any

from undercroft import descriptions, reasons
from undercroft.cli import arguments, engines, output, summary
from undercroft.cli.output import say
from undercroft.cli.sockets import absolute_path

LOOKUPS_MAX = 4096
"""Number of lookups that an engine keeps."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "explain",
        parents=[shared],
        help="show how many tokens the last requests found, and why no more",
        description="Shows the last lookups of `undercroft serve` or the engine inside a vLLM. For each: the tokens "
        "of the prompt, those on the device, those found in the cache and those loaded, and the reason why the rest is "
        f"missing. An engine keeps the last {LOOKUPS_MAX}. Exit code 1 if no engine answers, or it knows no such "
        "request.",
        epilog="examples: undercroft explain --misses --last 50; undercroft explain --summary --since 12h",
    )
    arguments.add_engine(parser, absolute_path)
    parser.add_argument(
        "--request", metavar="ID", default="", help="only requests whose id in vLLM's log begins with ID"
    )
    parser.add_argument("--misses", action="store_true", help="only requests of which a part was missing")
    parser.add_argument(
        "--last",
        type=arguments.whole(1, LOOKUPS_MAX),
        default=20,
        metavar="N",
        help="number of lookups, newest last (%(default)s)",
    )
    summary.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the lookups, or their sums."""
    if summary.is_asked(args):
        return summary.run(args)
    socket = engines.socket_of(args)
    lookups = _ask(socket, args.request, args.misses, args.last)
    if not lookups and args.request:
        raise output.CommandError(
            f"--request {args.request}: not among the last {LOOKUPS_MAX} lookups of unix://{socket}"
        )
    if args.json:
        output.print_json({"socket": socket, "lookups": lookups})
    elif args.request:
        for one in lookups:
            _print_one(one)
            _print_differences(socket, one)
    else:
        _print_table(lookups)
    return 0


def _ask(socket: str, request: str, misses: bool, last: int) -> list[dict[str, Any]]:
    """The last lookups, the oldest first."""
    found: list[dict[str, Any]] = []
    before = None
    while len(found) < last:
        query = {"request": request, "misses": misses, "before": before}
        said = engines.operate(socket, {"explain": query})
        found += said["lookups"]
        before = said["before"]
        if before is None:
            break
    return found[:last][::-1]


def _print_table(lookups: list[dict[str, Any]]) -> None:
    if not lookups:
        say("no lookups yet")
        return
    columns = ("request", "ago", "prompt", "device", "found", "hit", "disk", "waited", "missing because")
    rows = [
        (
            one["request"],
            output.age_text(one["age_s"]),
            one["asked_tokens"],
            one["device_tokens"],
            one["found_tokens"],
            one["hit_tokens"] or "-",
            one["disk_tokens"] or "-",
            f"{one['waited_ms']} ms",
            "-" if one["reason"] == "complete" else _short(one),
        )
        for one in lookups
    ]
    output.print_table(columns, rows)


def _short(one: dict[str, Any]) -> str:
    reason = str(one["reason"]).replace("_", " ")
    return reason if one["ago_s"] is None else f"{reason}, {output.age_text(one['ago_s'])} before"


def _print_one(one: dict[str, Any]) -> None:
    say(f"{one['request']}, answered {output.age_text(one['age_s'])} ago")
    say(f"  {one['asked_tokens']} tokens in whole blocks, {one['device_tokens']} of them on the device")
    say(f"  {one['found_tokens']} tokens were found in the cache")
    if hit := one["hit_tokens"]:
        remote = f", {one['remote_tokens']} from the remote store" if one.get("remote_tokens") else ""
        loaded = "loaded" if one["loaded"] else "not loaded (yet)"
        say(f"  the hit ended at {hit} tokens, {one['disk_tokens']} of them from disk{remote}; {loaded}")
    else:
        say("  no hit: nothing was loaded")
    say(f"  the scheduler waited {one['waited_ms']} ms for the answer")
    say(f"  {one['reason']}: {reasons.sentence(one['reason'], one['ago_s'])}")
    if one["missing_block"]:
        say(f"  first missing block: hash {one['missing_block']}...")
    say(f"  namespace {one['namespace'][:12]}")


def _print_differences(socket: str, one: dict[str, Any]) -> None:
    """Print the fields in which the namespace that has the missing block differs from the request's namespace."""
    if not one["other_namespace"]:
        return
    theirs, ours = (_description(socket, one[name]) for name in ("other_namespace", "namespace"))
    texts = descriptions.differences(theirs, ours)
    found = (
        f"it differs: {'; '.join(texts)}" if texts else "it has the same description, and was reset or differs in size"
    )
    say(
        f"  namespace {one['other_namespace'][:12]} has the block; {found.replace(', here ', ', that of the request ')}"
    )


def _description(socket: str, digest: str) -> dict[str, Any]:
    said = engines.operate(socket, {"describe": {"namespace": digest}})
    return descriptions.parsed(said["description"] or "")
