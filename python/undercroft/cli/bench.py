"""``undercroft bench``: what the machine and the engine reach, and the bare device beside it in the same run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from undercroft.cli import output
from undercroft.units import parse_size


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand and its own subcommands."""
    parser = commands.add_parser("bench", help="measure lookup, disk, copies or recovery; replay a trace")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    lookup = _add(
        kinds, shared, "lookup", "lookups of a prefix that is wholly in host memory, as vLLM calls them", _lookup
    )
    lookup.add_argument("--mode", choices=("embedded",), default="embedded", help="where the engine runs")
    lookup.add_argument(
        "--keys", type=_positive, default=8192, metavar="N", help="block hashes of the prompt (%(default)s)"
    )
    lookup.add_argument("--rounds", type=_positive, default=2000, metavar="R", help="lookups measured (%(default)s)")

    disk = _add(kinds, shared, "disk", "the disk tier through the whole engine, against a bare O_DIRECT loop", _disk)
    disk.add_argument("--path", metavar="DIR", help="directory on the device to measure (default: a temporary one)")
    disk.add_argument("--block-bytes", type=_size, default=2 << 20, metavar="B", help="payload size (2MiB)")
    disk.add_argument(
        "--blocks", type=_positive, default=1024, metavar="K", help="payloads written and read (%(default)s)"
    )

    disk.add_argument("--depth", type=_positive, default=32, metavar="D", help="operations in flight (%(default)s)")

    copy = _add(kinds, shared, "copy", "copies between device blocks and the arena, against memcpy", _copy)
    copy.add_argument("--block-bytes", type=_size, default=2 << 20, metavar="B", help="bytes of a block (2MiB)")
    copy.add_argument("--blocks", type=_positive, default=256, metavar="K", help="blocks of a job (%(default)s)")
    copy.add_argument("--layers", type=_positive, default=32, metavar="L", help="layers of a block (%(default)s)")

    recover = _add(kinds, shared, "recover", "how long opening a full directory takes", _recover)
    recover.add_argument("--path", metavar="DIR", help="directory to make the store in (default: a temporary one)")
    recover.add_argument("--blocks", type=_positive, default=1_000_000, metavar="K", help="blocks in it (%(default)s)")

    replay = _add(
        kinds, shared, "replay", "hit rates and insert rates of a trace on the engine's own policies", _replay
    )
    replay.add_argument("--trace", required=True, metavar="FILE", help="JSON lines with input_length and hash_ids")
    replay.add_argument(
        "--host-blocks", required=True, type=_positive, metavar="N", help="blocks that host memory holds"
    )
    replay.add_argument(
        "--disk-blocks", type=_not_negative, default=0, metavar="M", help="blocks that the disk holds (0: no disk)"
    )
    replay.add_argument(
        "--policy", choices=("lru", "leafhd"), default="lru", help="eviction policy of both tiers (%(default)s)"
    )
    replay.add_argument("--second-touch", action="store_true", help="write to disk only what comes a second time")


def _add(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
    shared: argparse.ArgumentParser,
    name: str,
    help_text: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, parents=[shared], help=help_text, description=f"Measures {help_text}.")

    def run(args: argparse.Namespace) -> int:
        result = measure(args)
        output.print_json(result) if args.json else output.print_fields(result)
        return 0

    parser.set_defaults(run=run)
    return parser


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return number


def _not_negative(value: str) -> int:
    number = int(value)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return number


def _size(value: str) -> int:
    return parse_size(value)


def _lookup(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft.cli.bench_lookup import measure

    return measure(args.keys, args.rounds)


def _copy(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft.device.bench import run_copy_bench

    try:
        return run_copy_bench(block_bytes=args.block_bytes, blocks=args.blocks, layers=args.layers)
    except ValueError as error:
        raise output.CommandError(str(error)) from None


def _disk(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft import _core

    with _directory(args.path) as path:
        return _core.bench_disk(path, args.block_bytes, args.blocks, args.depth)


def _recover(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft import _core

    with _directory(args.path) as path:
        return _core.bench_recover(path, args.blocks)


def _replay(args: argparse.Namespace) -> dict[str, Any]:
    from undercroft import _core

    return _core.bench_replay(args.trace, args.host_blocks, args.disk_blocks, args.policy, args.second_touch)


def _directory(base: str | None) -> tempfile.TemporaryDirectory[str]:
    """A directory of the benchmark's own below ``base``, removed at the end: an existing cache is never touched."""
    if base is not None:
        Path(base).mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=base, prefix="undercroft-bench-")
