"""``undercroft warm``: has a vLLM compute prompts, so that their blocks are cached."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from undercroft import hints
from undercroft.cli import output, prompts, vllm_http
from undercroft.cli.arguments import whole
from undercroft.cli.output import CommandError, say

_PARAMS = "kv_transfer_params"
_WANTED = {_PARAMS: {hints.NAME: {"prefetch": True}}}
"""A hint that names the prompt's blocks, so that they are saved whatever they seem to be worth."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "warm",
        parents=[shared],
        help="have a vLLM compute prompts, so that their blocks are cached",
        description="Sends each prompt to a vLLM and asks for one token. Tells the progress on stderr. Exit code 0 if "
        "vLLM has computed all, 1 if it has refused some or does not answer. Ctrl-C ends the command at once, and vLLM "
        "computes none of the prompts further.",
        epilog="example: undercroft warm --url http://127.0.0.1:8000 prompts.jsonl",
    )
    prompts.add_file(parser)
    vllm_http.add_arguments(parser)
    parser.add_argument(
        "--parallel",
        type=whole(1, 256),
        default=4,
        metavar="N",
        help="prompts that are sent at once (%(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send each line of the file."""
    lines = prompts.read(args.file, prompts.is_prompt, prompts.ALLOWED)
    vllm = vllm_http.Vllm(args.url, args.api_key)
    model = args.model or vllm.first_model()
    start = time.monotonic()
    done: list[dict[str, Any]] = []
    for one in _complete_all(vllm, model, lines, args.parallel):
        done.append(one)
        said = one.get("error") or f"{one['tokens']} tokens, {one['cached']} of them cached"
        say(f"{len(done)} of {len(lines)}: line {one['line']}, {said}", file=sys.stderr, flush=True)
    refused = sum("error" in one for one in done)
    total = {
        "prompts": len(done),
        "refused": refused,
        "tokens": sum(one.get("tokens", 0) for one in done),
        "cached": sum(one.get("cached", 0) for one in done),
        "seconds": time.monotonic() - start,
    }
    if args.json:
        output.print_json(total | {"lines": sorted(done, key=lambda one: int(one["line"]))})
    else:
        say(
            f"{output.count(len(done), 'prompt')} ({refused} refused), {total['tokens']} tokens "
            f"({total['cached']} of them were cached) in {total['seconds']:.1f} s"
        )
    return 1 if refused else 0


def _complete_all(
    vllm: vllm_http.Vllm, model: str, lines: list[tuple[int, Any]], parallel: int
) -> Iterator[dict[str, Any]]:
    """The result of each line, in the order of vLLM's answers. Raises CommandError."""
    waiting: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
    results: SimpleQueue[dict[str, Any] | CommandError] = SimpleQueue()
    for each in lines:
        waiting.put(each)

    def work() -> None:
        while (given := waiting.get()) is not None:
            results.put(_complete(vllm, model, *given))

    for _ in range(min(parallel, len(lines))):
        waiting.put(None)
        # Daemon threads: an interrupt ends the process. Its connections end, so vLLM stops computing for them.
        threading.Thread(target=work, daemon=True).start()
    for _ in lines:
        result = results.get()
        if isinstance(result, CommandError):
            raise result
        yield result


def _complete(vllm: vllm_http.Vllm, model: str, number: int, line: Any) -> dict[str, Any] | CommandError:
    fields = {} if isinstance(line, dict) and _PARAMS in line else _WANTED
    try:
        # A prompt may wait for a long time behind others.
        usage = vllm.complete(model, line, fields, timeout_s=None).get("usage") or {}
    except vllm_http.RefusedError as error:
        return {"line": number, "error": str(error)}
    except CommandError as error:
        return error
    details = usage.get("prompt_tokens_details") or {}
    return {"line": number, "tokens": usage.get("prompt_tokens", 0), "cached": details.get("cached_tokens") or 0}
