"""``undercroft import``: the blocks of a file that ``undercroft export`` has written, into a running engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from undercroft.cli import arguments, engines, output
from undercroft.cli.output import say
from undercroft.cli.sockets import absolute_path
from undercroft.errors import ConfigError
from undercroft.units import format_size


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "import",
        parents=[shared],
        help="save the blocks of an exported namespace in a running engine",
        description="Verifies every byte of the file, then saves its blocks in the engine as a vLLM saves its own: "
        "blocks that the engine has are left as they are. A vLLM finds them if its namespace is the file's. Exit code "
        "1 if the file is damaged, no engine answers, or it has no memory; 2 if the file is no export.",
        epilog="example: undercroft import llama.blocks --disk-path /mnt/nvme0/undercroft",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="as undercroft export has written it")
    arguments.add_engine(parser, absolute_path)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify and import the file."""
    from undercroft import _core

    if not args.file.is_file():
        raise ConfigError(f"{args.file}: there is no such file; give one that undercroft export has written")
    socket = engines.socket_of(args)
    engines.ask(socket)
    shows = not args.json and sys.stderr.isatty()
    bars: dict[str, tqdm[Any]] = {}

    def progress(step: str, done: int, total: int) -> None:
        if step not in bars:
            bars[step] = tqdm(desc=step, total=total, unit_scale=True, disable=not shows)
        bars[step].update(done - bars[step].n)

    try:
        imported: dict[str, Any] = _core.import_namespace(socket, str(args.file), progress)
    finally:
        for bar in bars.values():
            bar.close()
    if args.json:
        output.print_json({"file": str(args.file), "socket": socket, **imported})
        return 0
    saved, blocks = imported["saved_blocks"], imported["blocks"]
    say(f"{args.file}: {blocks} blocks, {format_size(imported['bytes'])}, all intact")
    known = "" if saved == blocks else f"; it had the other {blocks - saved} already, or did not admit them"
    say(f"the engine has taken {saved} blocks of namespace {imported['namespace'][:12]}{known}")
    return 0
