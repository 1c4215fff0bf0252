"""``undercroft doctor``: checks the machine and the installation, and advises on each shortfall."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import asdict

from undercroft.cli import arguments, output, planning, waiting
from undercroft.cli.doctor.check import Check
from undercroft.cli.output import say
from undercroft.config import OPTIONS, UndercroftConfig

_TAKEN = {"host_memory": "SIZE", "disk_path": "DIR", "disk_capacity": "SIZE", "key_file": "FILE"}
"""Options that the command takes, each with the name of its value in the help."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        parents=[shared],
        help="check the machine and the installation, with advice on each shortfall",
        description="Checks kernel, limits, memory, disks, GPU and vLLM, and tells how a start would use the "
        "directories. The exit code is 1 if a check fails, not for warnings.",
        epilog="example: undercroft doctor --role serve --host-memory 64GiB --disk-path /mnt/nvme0/undercroft "
        "--disk-path /mnt/nvme1/undercroft",
    )
    parser.add_argument(
        "--role",
        choices=("vllm", "serve"),
        default="vllm",
        help="the program to run here: vLLM, or undercroft serve, which needs neither vLLM nor a GPU (%(default)s)",
    )
    for option in (option for option in OPTIONS if option.name in _TAKEN):
        several = option.name == "disk_path"
        parser.add_argument(
            option.flag,
            action="append" if several else "store",
            metavar=_TAKEN[option.name],
            help="also check this directory of the disk tier (may be given several times)"
            if several
            else f"the option {option.name} (default: {option.default or 'none'})".replace("%", "%%"),
        )
    parser.add_argument(
        "--remote", metavar="URL", help="also check this remote store: reachability, credentials, latency, clock"
    )
    arguments.add_owner(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run all checks, and print each when it is done."""
    given = {name: value for name in _TAKEN if (value := getattr(args, name)) is not None}
    config = UndercroftConfig.parse({}, {}, flags=given)
    checks = []
    for check in _checks(config, args.role, args.remote, args.remote_any_owner):
        checks.append(check)
        if not args.json:
            _print(check)
    ok = all(check.status != "fail" for check in checks)
    if args.json:
        output.print_json({"ok": ok, "checks": [asdict(check) for check in checks]})
    return 0 if ok else 1


def _checks(config: UndercroftConfig, role: str, remote: str | None, any_owner: bool) -> Iterator[Check]:
    """The checks in order. The longest check comes last: torch takes seconds to load."""
    from undercroft.cli.doctor import plans, system

    yield from system.checks(config, role)
    if remote is not None:
        yield from _remote_checks(remote, any_owner)
    with contextlib.suppress(ImportError):
        yield from plans.checks()
    from undercroft.cli.doctor import software

    yield from software.checks(role)


def _remote_checks(url: str, any_owner: bool = False) -> Iterator[Check]:
    from undercroft import _core

    for found in waiting.until_interrupted(lambda: _core.remote_check(url, any_owner=any_owner)):
        yield Check(found["name"], found["status"], found["found"], found["advice"])  # type: ignore[arg-type]


def _print(check: Check) -> None:
    colours = {"ok": "32", "warn": "33", "fail": "31"}
    mark = output.coloured(f"{check.status:<4}", colours[check.status])
    say(f"  {check.name:<16} {check.found}", mark=mark, flush=True)
    if check.advice:
        say(f"      {'':<16} -> {check.advice}", flush=True)
    if check.plan:
        output.print_table(planning.HEADER, check.plan)
