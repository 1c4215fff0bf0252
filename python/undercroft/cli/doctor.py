"""``undercroft doctor``: what this machine offers, and what to do about each shortfall."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from undercroft.cli import output


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``warn`` costs speed or a feature; ``fail`` keeps undercroft from working."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        parents=[shared],
        help="check what this machine offers, and say what to do about each shortfall",
        description="Checks kernel, limits, memory, disk, GPU and vLLM. "
        "Exit code 1 if a check failed (not for warnings).",
    )
    parser.add_argument("--disk-path", metavar="DIR", help="also check the directory meant for the disk tier")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make all checks and print them."""
    from undercroft.cli import doctor_software, doctor_system

    checks = [*doctor_system.checks(args.disk_path), *doctor_software.checks()]
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
