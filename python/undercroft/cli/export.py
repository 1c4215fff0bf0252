"""``undercroft export``: the blocks of a namespace on disk, in a file for another host."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from undercroft.cli import engines, output
from undercroft.cli.output import say
from undercroft.cli.sockets import absolute_path
from undercroft.units import format_size


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "export",
        parents=[shared],
        help="write the blocks of a namespace into a file",
        description="Copies the blocks of a namespace, with their checksums, from the directories of a running engine, "
        "or from the given ones, into a file for undercroft import on another host. Nothing is changed. Blocks "
        "that are in host memory only are left out: run undercroft drain before, which writes them. The file appears "
        "when it is complete. Exit code 1 if it cannot be written.",
        epilog="example: undercroft export 3f9a1c02 llama.blocks --disk-path /mnt/nvme0/undercroft",
    )
    parser.add_argument("namespace", metavar="NAMESPACE", help="eight or more first digits of its digest (inspect)")
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to write")
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="the key_file of encrypted directories (the exported file is not encrypted)",
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--socket", type=absolute_path, metavar="PATH", help="where the engine listens (the only engine of this user)"
    )
    place.add_argument(
        "--disk-path", action="append", metavar="DIR", help="a directory, in use or not (once for each of an engine)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file."""
    from undercroft import _core

    directories = args.disk_path or _directories(args)
    shows = not args.json and sys.stderr.isatty()
    with tqdm(desc="export", unit=" blocks", unit_scale=True, disable=not shows) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        exported: dict[str, Any] = _core.export_namespace(
            directories, args.namespace, str(args.file.absolute()), str(args.key_file or ""), progress
        )
    if args.json:
        output.print_json({"file": str(args.file), **exported})
        return 0
    size = format_size(exported["bytes"])
    say(f"{args.file}: {exported['blocks']} blocks, {size}, of namespace {exported['namespace'][:12]}")
    if left := exported["left_out"]:
        say(f"{left} blocks were left out: replaced meanwhile, damaged, or after such a block")
    return 0


def _directories(args: argparse.Namespace) -> list[str]:
    socket = engines.socket_of(argparse.Namespace(socket=args.socket, disk_path=None))
    disks = engines.ask(socket)["info"].get("disks", ())
    if not disks:
        raise output.CommandError(f"the engine at unix://{socket} has no disk tier; --disk-path names a directory")
    return [str(disk["path"]) for disk in disks]
