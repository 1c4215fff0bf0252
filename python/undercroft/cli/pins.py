"""Shared parts of ``undercroft pin`` and ``undercroft unpin``: hints about a list of prompts, or of block hashes.

Hints about prompts are sent over HTTP to a vLLM, which computes the tokens and block hashes of a prompt. Hints about
block hashes are sent to an engine's own socket. No KV is computed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from undercroft import hints
from undercroft.cli import engines, prompts, vllm_http
from undercroft.cli.output import CommandError, say
from undercroft.cli.sockets import absolute_path
from undercroft.errors import ConfigError

DESCRIPTION = (
    "Asks a vLLM, which knows the tokens of a prompt and whose client_fields must allow hints, or with --socket or "
    "--disk-path an engine itself, which needs block hashes. Nothing is computed. Exit code 1 if the pin of a line is "
    "rejected."
)

Give = Callable[[Any], dict[str, Any]]
"""Sends the hint about a line, and returns the answer."""


def add_arguments(parser: argparse.ArgumentParser, file: str | None = None) -> None:
    """Add the arguments for the prompts and the recipient. ``file``: ``nargs`` of the file's argument."""
    prompts.add_file(parser, file)
    place = parser.add_mutually_exclusive_group()
    vllm_http.add_arguments(parser, place)
    place.add_argument("--socket", type=absolute_path, metavar="PATH", help="where an engine listens")
    place.add_argument("--disk-path", metavar="DIR", help="the engine that has this directory open")
    parser.add_argument(
        "--namespace",
        metavar="DIGEST",
        default="",
        help="beginning of the digest of the engine's namespace, where it has several (`undercroft status`)",
    )
    parser.add_argument(
        "--hashes", action="store_true", help="each line is a JSON list of the block hashes of a prompt, in hexadecimal"
    )
    parser.add_argument("--id", dest="name", metavar="NAME", help="name of the pin, for a file of one line")


def run(args: argparse.Namespace, verb: str, fields: dict[str, Any]) -> int:
    """Send the hint ``verb`` with ``fields`` for each line of the file. Returns 1 if a hint applies to no block."""
    to_engine = args.socket is not None or args.disk_path is not None
    if to_engine and args.file is not None and not args.hashes:
        raise ConfigError("an engine does not know the tokens of a prompt; give --hashes and block hashes, or --url")
    lines = _lines(args)
    if args.name:
        if len(lines) > 1:
            raise ConfigError(f"--id {args.name}: the name is one pin's, and the file has {len(lines)} lines")
        fields = fields | {"id": args.name}
    give = _to_engine(args, verb, fields) if to_engine else _to_vllm(args, verb, fields)
    answers = [give(line) for _, line in lines]
    if args.json:
        say(json.dumps({"answers": answers}))
    else:
        for (number, _), answer in zip(lines, answers, strict=True):
            reason = f" ({answer['reason']})" if "reason" in answer else ""
            say(f"line {number}: {answer['answer']}, {answer['tokens']} tokens{reason}")
    return 1 if any(answer["answer"] == "rejected" for answer in answers) else 0


def _lines(args: argparse.Namespace) -> list[tuple[int, Any]]:
    if args.file is None:
        if not args.name:
            raise ConfigError("give a file of prompts, or --id with the name of a pin")
        return [(1, None)]
    if args.hashes:
        return prompts.read(args.file, lambda line: hints.parse_hashes(line) is not None, hints.HASHES_ALLOWED)
    return prompts.read(args.file, prompts.is_prompt, prompts.ALLOWED)


def _to_vllm(args: argparse.Namespace, verb: str, fields: dict[str, Any]) -> Give:
    vllm = vllm_http.Vllm(args.url, args.api_key)
    model = args.model or vllm.first_model()

    def give(line: Any) -> dict[str, Any]:
        named = fields
        if line is None or args.hashes:
            # The request needs a prompt, whose text has no effect.
            line, named = {"prompt": "."}, fields if line is None else fields | {"hashes": line}
        params = {hints.NAME: {verb: named, hints.COMPUTE: False}}
        found = vllm.complete(model, line, {"kv_transfer_params": params})
        answers = (found.get("kv_transfer_params") or {}).get(hints.NAME) or {}
        if verb not in answers:
            raise CommandError(f"{vllm.url}: the vLLM there does not answer hints; is undercroft its connector?")
        return dict(answers[verb])

    return give


def _to_engine(args: argparse.Namespace, verb: str, fields: dict[str, Any]) -> Give:
    socket = engines.socket_of(args)

    def give(line: Any) -> dict[str, Any]:
        hint = {
            "namespace": args.namespace,
            "verb": verb,
            "hashes": line or [],
            "ttl_ns": int(fields.get("ttl_s", 0) * 1e9),
            "name": fields.get("id", ""),
        }
        said = engines.operate(socket, {"hint": hint})
        if "error" in said:
            raise CommandError(f"unix://{socket}: {said['error']}")
        return said

    return give
