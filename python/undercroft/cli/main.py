"""Entry point of the ``undercroft`` command: parses arguments, turns errors into messages and exit codes.

Exit codes: 0 success; 1 a check failed, a corrupt payload was found, or an error (message on stderr); 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from undercroft.cli import bench, doctor, inspect, output, serve, status
from undercroft.config import ConfigError


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="undercroft", description="Tiered KV cache for vLLM: serve it, look at it and at this machine, measure."
    )
    parser.add_argument("--version", action="version", version=f"undercroft {metadata.version('undercroft')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    for module in (serve, status, doctor, inspect, bench):
        module.add_parser(commands, shared)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own arguments) and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone; the interpreter must not write to the pipe again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ConfigError as error:
        print(f"undercroft: error: {str(error).removeprefix('undercroft: ')}", file=sys.stderr)
        return 2
    except Exception as error:
        if not _is_expected(error):
            raise
        print(f"undercroft: error: {error}", file=sys.stderr)
        return 1


def _is_expected(error: Exception) -> bool:
    """Whether the error is the core's or the system's own message, which needs no traceback."""
    if isinstance(error, output.CommandError | OSError | ImportError):
        return True
    core = sys.modules.get("undercroft._core")
    return core is not None and isinstance(error, core.UndercroftError)


if __name__ == "__main__":
    sys.exit(main())
