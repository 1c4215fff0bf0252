"""Shared parts of ``undercroft pin`` and ``undercroft unpin``: hints about a list of prompts, or of block hashes.

The hints go to a vLLM over HTTP, since it alone knows the tokens of a prompt and the namespace. Nothing is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from undercroft import hints
from undercroft.cli.output import CommandError

_TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompts, and the vLLM that is told."""
    parser.add_argument(
        "file",
        type=Path,
        help="prompts, one in each line: JSON text, a JSON list of token ids, or an object of fields of a completion "
        'or chat request ("-": standard input)',
    )
    parser.add_argument("--url", default="http://localhost:8000", help="address of vLLM (%(default)s)")
    parser.add_argument("--model", help="name of the model (the first one that vLLM serves)")
    parser.add_argument(
        "--hashes", action="store_true", help="each line is a JSON list of the block hashes of a prompt, in hexadecimal"
    )
    parser.add_argument("--id", dest="name", metavar="NAME", help="name of the pin, for a file of one line")


def run(args: argparse.Namespace, verb: str, fields: dict[str, Any]) -> int:
    """Give the hint ``verb`` with ``fields`` for each line of the file. 1 if it holds for none of a line's blocks."""
    lines = _lines(args)
    if args.name:
        if len(lines) > 1:
            raise CommandError(f"--id {args.name}: the name is one pin's, and the file has {len(lines)} lines")
        fields = fields | {"id": args.name}
    model = args.model or _model(args.url)
    answers = [_give(args.url, model, line, verb, fields, args.hashes) for line in lines]
    if args.json:
        print(json.dumps({"answers": answers}))
    else:
        for number, answer in enumerate(answers, 1):
            reason = f" ({answer['reason']})" if "reason" in answer else ""
            print(f"line {number}: {answer['answer']}, {answer['tokens']} tokens{reason}")
    return 1 if any(answer["answer"] == "rejected" for answer in answers) else 0


def _lines(args: argparse.Namespace) -> list[Any]:
    try:
        text = sys.stdin.read() if str(args.file) == "-" else args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{args.file}: it cannot be read ({error})") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except ValueError:
            raise CommandError(f"{args.file}, line {number}: it is not JSON; allowed: {_allowed(args)}") from None
        if not _is_possible(found[-1], args.hashes):
            raise CommandError(f"{args.file}, line {number}: allowed: {_allowed(args)}")
    if not found:
        raise CommandError(f"{args.file}: it has no line")
    return found


def _allowed(args: argparse.Namespace) -> str:
    if args.hashes:
        return hints.HASHES_ALLOWED
    return 'text in quotes, a list of token ids, or an object with "prompt" or "messages"'


def _is_possible(line: Any, hashes: bool) -> bool:
    if hashes:
        return hints.parse_hashes(line) is not None
    if isinstance(line, dict):
        return "prompt" in line or "messages" in line
    is_ids = isinstance(line, list) and line and all(isinstance(one, int) for one in line)
    return bool(isinstance(line, str) or is_ids)


def _give(url: str, model: str, line: Any, verb: str, fields: dict[str, Any], hashes: bool) -> dict[str, Any]:
    """vLLM's answer to the hint about a line."""
    request: dict[str, Any] = line if isinstance(line, dict) else {"prompt": line}
    if hashes:
        # The request needs a prompt; any will do.
        request, fields = {"prompt": "."}, fields | {"hashes": line}
    params = {hints.NAME: {verb: fields, hints.COMPUTE: False}}
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    body = {"model": model, "max_tokens": 1, **request, "stream": False, "kv_transfer_params": params}
    found = _ask(url + path, body)
    answers = (found.get("kv_transfer_params") or {}).get(hints.NAME) or {}
    if verb not in answers:
        raise CommandError(f"{url}: the vLLM there does not answer hints; is undercroft its connector?")
    return dict(answers[verb])


def _model(url: str) -> str:
    models = _ask(url + "/v1/models", None).get("data") or []
    if not models:
        raise CommandError(f"{url}: it serves no model")
    return str(models[0]["id"])


def _ask(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    content = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:500]
        raise CommandError(f"{url}: HTTP {error.code}: {text}") from None
    except (OSError, ValueError) as error:
        raise CommandError(f"{url}: no vLLM answers there ({error})") from None
