"""``undercroft remote gc URL``: removes old objects from a remote store."""

from __future__ import annotations

import argparse
import sys

from tqdm import tqdm

from undercroft.cli import arguments, output
from undercroft.cli.confirm import add_yes, confirm
from undercroft.cli.output import say
from undercroft.errors import ConfigError
from undercroft.remote_url import without_credentials
from undercroft.units import format_size


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "remote",
        help="remove old objects from a remote store",
        description="Maintains a remote store. Each KIND takes --json.",
        epilog="example: undercroft remote gc s3://bucket/undercroft",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    gc = kinds.add_parser(
        "gc",
        parents=[shared],
        help="remove the oldest objects",
        description="Removes the oldest objects of a remote store until the others fit, and those beyond an age. Run "
        "it now and then, from cron with --yes, on any host. It may run beside engines that write, and twice at once. "
        "An object that was written or read within the last minute stays. A Redis server removes objects itself. Exit "
        "code 2 without a terminal and without --yes or --dry-run.",
        epilog="example: undercroft remote gc s3://bucket/undercroft --max-bytes 20TiB --max-age 7d --yes",
    )
    gc.add_argument("url", metavar="URL", help="as the option remote")
    gc.add_argument("--max-bytes", type=arguments.size, metavar="SIZE", help="keep at most this many bytes")
    gc.add_argument(
        "--max-age",
        type=arguments.duration,
        metavar="TIME",
        help="remove objects that no host has used for this time, such as 3d",
    )
    gc.add_argument("--dry-run", action="store_true", help="only report the objects that would be removed")
    add_yes(gc)
    arguments.add_owner(gc)
    gc.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Remove the objects, and print the result."""
    from undercroft import _core

    if args.max_bytes is None and args.max_age is None:
        raise ConfigError("nothing to remove: give --max-bytes, --max-age, or both")
    if not args.dry_run:
        confirm(args, f"{_objects(args)} from {without_credentials(args.url)}")
    with tqdm(desc="remove", unit=" objects", disable=args.json or not sys.stderr.isatty()) as bar:

        def progress(counts: list[int]) -> None:
            bar.total = counts[1]
            bar.update(counts[0] - bar.n)

        report = _core.remote_gc(
            args.url,
            progress,
            max_bytes=args.max_bytes,
            max_age=args.max_age,
            dry_run=args.dry_run,
            any_owner=args.remote_any_owner,
        )
    if args.json:
        output.print_json(report)
        return 0
    done = "would be removed" if report["dry_run"] else "removed"
    say(f"{report['objects']} objects, {format_size(report['bytes'])}")
    say(f"{done}: {report['removed_objects']} objects, {format_size(report['removed_bytes'])}")
    if report["skipped_objects"]:
        say(f"kept, since they were written or removed meanwhile: {report['skipped_objects']} objects")
    if report["removed_leftovers"]:
        say(f"removed files of writers that were killed: {report['removed_leftovers']} files")
    if report["excess_bytes"]:
        say(f"above --max-bytes: {format_size(report['excess_bytes'])}, used within the last minute; run it again")
    if report["oldest_s"] is not None:
        say(f"the oldest that is left was used {output.age_text(report['oldest_s'])} ago")
    return 0


def _objects(args: argparse.Namespace) -> str:
    """The objects that the command removes, as a text for people."""
    limits = []
    if args.max_age is not None:
        limits.append(f"not used for {output.age_text(args.max_age)}")
    if args.max_bytes is not None:
        limits.append(f"beyond {format_size(args.max_bytes)}, the oldest first")
    return f"the objects {' or '.join(limits)},"
