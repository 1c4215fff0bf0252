"""``undercroft inspect DIR``: what a cache directory holds; ``--verify`` reads and checks every payload, ``--drop``
removes a namespace."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tqdm import tqdm

from undercroft.cli import output


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "inspect",
        parents=[shared],
        help="show what a cache directory holds",
        description="Shows namespaces, blocks, bytes and age of a cache directory. Changes nothing "
        "without --drop. Exit code 1 if --verify finds a corrupt payload.",
    )
    parser.add_argument("directory", metavar="DIR", help="the disk_path of an engine")
    parser.add_argument("--verify", action="store_true", help="read every payload and compare its checksum")
    parser.add_argument(
        "--drop",
        metavar="NAMESPACE",
        help="first remove the namespace with this digest (eight digits or more); the directory must not be in use",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary, and the result of the verification."""
    from undercroft import _core

    dropped = None
    if args.drop is not None:
        dropped = _core.drop_namespace(args.directory, args.drop)
        if not dropped:
            raise output.CommandError(
                f"{args.directory} holds no namespace {args.drop}; undercroft inspect lists those it holds"
            )
    found: dict[str, Any] = _core.inspect(args.directory)
    if dropped is not None:
        found["dropped_namespaces"] = dropped
    if args.verify:
        found["verify"] = _verify(args.directory, quiet=args.json)
    if args.json:
        output.print_json(found)
    else:
        _print(found)
    return 1 if args.verify and found["verify"]["corrupt"] else 0


def _verify(directory: str, *, quiet: bool) -> dict[str, Any]:
    from undercroft import _core

    disable = quiet or not sys.stderr.isatty()
    with tqdm(desc="verify", unit=" blocks", unit_scale=True, disable=disable) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return _core.verify(directory, progress)


def _print(found: dict[str, Any]) -> None:
    if "dropped_namespaces" in found:
        print(f"removed namespaces: {found['dropped_namespaces']}")
    used, capacity = found["used_bytes"], found["capacity_bytes"]
    print(f"format version {found['format_version']}, {found['records']} blocks")
    print(f"{output.bytes_text(used)} used of {output.bytes_text(capacity)}")
    if found["damaged_records"]:
        print(f"{found['damaged_records']} damaged records (their slots are used again, nothing is served from them)")
    if found["namespaces"]:
        print()
        output.print_table(
            ("namespace", "blocks", "bytes", "oldest", "newest", "model"),
            [
                (
                    space["digest"][:12],
                    space["blocks"],
                    output.bytes_text(space["bytes"]),
                    output.age_text(space["oldest_s"]),
                    output.age_text(space["newest_s"]),
                    space["description"],
                )
                for space in found["namespaces"]
            ],
        )
    if "verify" in found:
        result = found["verify"]
        read = output.bytes_text(result["bytes"])
        print(f"\nverified {result['checked']} blocks, {read}: {result['corrupt'] or 'none'} corrupt")
