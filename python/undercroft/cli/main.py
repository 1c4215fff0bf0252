"""Entry point of the ``undercroft`` command: parses arguments, turns errors into messages and exit codes.

Exit codes: 0 success; 1 a check failed, a corrupt payload was found, or something failed while it ran; 2 the operator
must change something: wrong usage, an option's value, or a directory that cannot be used. Errors are one line on
stderr.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

import undercroft
from undercroft.cli.output import described, say
from undercroft.errors import ConfigError
from undercroft.option_values import did_you_mean
from undercroft.printable import printable

COMMANDS = (
    "serve",
    "status",
    "top",
    "explain",
    "doctor",
    "check-config",
    "inspect",
    "remote",
    "size",
    "estimate",
    "pin",
    "unpin",
    "warm",
    "clear",
    "drain",
    "resize",
    "export",
    "import",
    "demo",
)
"""Subcommands; the module of each has its name, but that of ``import``, which is no name."""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of one of `COMMANDS` alone, which loads fastest, or of all of them. The benchmarks are loaded for
    ``bench`` only. Raises ConfigError."""
    parser = _Parser(
        prog="undercroft",
        description="Tiered KV cache for vLLM: run the server, inspect caches, check this machine, run benchmarks.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and the build")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = _Parser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    for name in [one for one in COMMANDS if command == one] or COMMANDS:
        file = "imports" if name == "import" else name.replace("-", "_")
        module = importlib.import_module(f"undercroft.cli.{file}")
        module.add_parser(commands, shared)
    bench = commands.add_parser("bench", help="measure this machine, a remote store, a trace or a running vLLM")
    if command == "bench":
        _load_bench().add_kinds(bench, shared)
    return parser


class _Parser(argparse.ArgumentParser):
    """Each subcommand refuses an argument that it does not know with its own usage, not with that of `undercroft`."""

    def error(self, message: str) -> NoReturn:
        # An argument may be the name of somebody's file.
        super().error(printable(message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [str(choice) for choice in action.choices or ()]
            raise argparse.ArgumentError(action, error.message + did_you_mean(str(value), choices)) from None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


class _Version(argparse.Action):
    """Prints version and build. The core is loaded for it alone: without the core, only the version is known."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            from undercroft import _core

            build = _core.__build__
        except ImportError as error:
            build = f"the core cannot be loaded: {error}"
        say(f"undercroft {undercroft.__version__} ({build})")
        parser.exit()


def _load_bench() -> ModuleType:
    """The benchmarks, which are a package of their own: a server has no use for them."""
    try:
        return importlib.import_module("undercroft_bench.cli")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "undercroft_bench":
            raise
        raise ConfigError(
            "the benchmarks are not installed; run: pip install 'undercroft[bench]', or in a checkout: "
            "pip install ./rust/pyo3-bench"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own arguments) and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = build_parser(argv[0] if argv else None).parse_args(argv)
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone; the interpreter must not write to the pipe again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        known = described(error)
        if known is None:
            raise
        code, text = known
        say(f"undercroft: error: {text}", file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main())
