"""``undercroft resize``: set the sizes of a running engine's tiers."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

from undercroft.cli import arguments, engines, output, waiting
from undercroft.cli.output import say
from undercroft.cli.sockets import absolute_path
from undercroft.errors import ConfigError
from undercroft.units import format_size

_TIERS = (("host", "host memory"), ("disk", "disk"))


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "resize",
        parents=[shared],
        help="set the sizes of a running engine's tiers",
        description="Makes host memory or the directories smaller while the engine runs, or larger again, up to their "
        "size at the start. The blocks that are worth least are evicted, and the system gets the memory and the space "
        "back. Blocks in use and pinned blocks stay. A restart takes the configured sizes again. Without a size, shows "
        "the sizes. Exit code 1 if no engine answers or --timeout is over, 2 if it refuses a size.",
        epilog="example: undercroft resize --host-memory 16GiB --disk-capacity 200GiB",
    )
    arguments.add_engine(parser, absolute_path)
    parser.add_argument("--host-memory", type=arguments.size, metavar="SIZE", help="size of host memory, like 16GiB")
    parser.add_argument(
        "--disk-capacity", type=arguments.size, metavar="SIZE", help="size of the files of each directory, like 200GiB"
    )
    parser.add_argument(
        "--timeout", type=arguments.seconds, default=600.0, metavar="S", help="longest wait in seconds (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Set the sizes, wait, and print them."""
    socket = engines.socket_of(args)
    order = {}
    if args.host_memory is not None:
        order["host_bytes"] = args.host_memory
    if args.disk_capacity is not None:
        order["disk_bytes"] = args.disk_capacity
        _check_space(socket, args.disk_capacity)
    if order:
        try:
            engines.operate(socket, {"resize": order})
        except output.CommandError as error:
            # The engine's message names the option. The operator used the flag.
            flag = re.sub("^(host|disk)_", r"--\1-", str(error))
            raise ConfigError(flag) from None
    resized, over = waiting.until(socket, {"resized": {}}, _is_over, _line, args.timeout if order else 0.0)
    if args.json:
        output.print_json({"socket": socket, "finished": over, **resized})
    else:
        _print(resized, finished=over or not order)
    return 0 if over or not order else 1


def _check_space(socket: str, capacity: int) -> None:
    """Refuse a size for which a filesystem has no room: smaller files have released their space. Raises ConfigError."""
    for disk in engines.ask(socket)["info"].get("disks", ()):
        try:
            place = Path(disk["path"])
            files = [(place / name).stat() for name in ("data", "table", "super")]
            system = os.statvfs(place)
        except OSError:
            # The engine detects this failure as well, and its status shows it.
            continue
        missing = capacity - sum(file.st_blocks * 512 for file in files)
        # The same reserve of the filesystem stays free as at a start.
        free = system.f_bavail * system.f_frsize - min(system.f_blocks * system.f_frsize // 20, 4 << 30)
        if missing > 0 and missing > free:
            raise ConfigError(
                f"--disk-capacity {format_size(capacity)}: {disk['path']} needs {format_size(missing)} more, and "
                f"{format_size(max(free, 0))} can be used now; free space there, or ask for less"
            )


def _is_over(said: dict[str, Any]) -> bool:
    return not any(said[tier]["resizing"] for tier, _ in _TIERS)


def _line(said: dict[str, Any]) -> str:
    parts = [f"{name} {_sizes(said[tier])}" for tier, name in _TIERS if said[tier]["resizing"]]
    return ", ".join(parts)


def _sizes(of: dict[str, Any]) -> str:
    return f"{format_size(of['capacity_bytes'])}, to be {format_size(of['target_bytes'])}"


def _print(resized: dict[str, Any], *, finished: bool) -> None:
    rows = []
    for tier, _ in _TIERS:
        of = resized[tier]
        if of["maximum_bytes"]:
            sizes = (of[f"{name}_bytes"] for name in ("capacity", "target", "maximum"))
            rows.append((tier, *(format_size(size) for size in sizes)))
    output.print_table(("tier", "capacity", "target", "largest"), rows)
    for tier, name in _TIERS:
        of = resized[tier]
        if of["resizing"]:
            say(f"{name}: blocks in use or pinned keep it larger than its target until their use ends")
        elif of["kept_bytes"]:
            size = format_size(of["kept_bytes"])
            say(f"{name}: {size} are unused, and the system does not have them back: {_WHY[tier]}")
    if any(resized[tier]["target_bytes"] < resized[tier]["maximum_bytes"] for tier, _ in _TIERS):
        say("a restart takes the configured sizes again: change the options to keep these")
    if not finished:
        say("not finished in time: the engine continues", file=sys.stderr)


_WHY = {
    "host": "a worker has pinned the memory for its GPU, until it ends",
    "disk": "the filesystem cannot free a part of a file, or the directory fails",
}
