"""``undercroft doctor``: checks the machine and the installation, and advises on each shortfall."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict

from undercroft.cli import output
from undercroft.cli.doctor.check import Check


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        parents=[shared],
        help="check the machine and the installation, with advice on each shortfall",
        description="Checks kernel, limits, memory, disk, GPU and vLLM. "
        "The exit code is 1 if a check fails; warnings do not count.",
    )
    parser.add_argument("--disk-path", metavar="DIR", help="also check the directory of the disk tier")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run all checks and print them."""
    from undercroft.cli.doctor import software, system

    checks = [*system.checks(args.disk_path), *software.checks()]
    ok = all(check.status != "fail" for check in checks)
    if args.json:
        output.print_json({"ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    return 0 if ok else 1


def _print(checks: Iterable[Check]) -> None:
    colours = {"ok": "32", "warn": "33", "fail": "31"}
    for check in checks:
        mark = f"{check.status:<4}"
        if sys.stdout.isatty():
            mark = f"\033[{colours[check.status]}m{mark}\033[0m"
        print(f"{mark}  {check.name:<16} {check.found}")
        if check.advice:
            print(f"      {'':<16} -> {check.advice}")
