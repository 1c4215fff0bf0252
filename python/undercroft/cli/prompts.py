"""Prompts in a file, and the vLLM that they go to over HTTP."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from undercroft.cli.output import CommandError

ALLOWED = 'text in quotes, a list of token ids, or an object with "prompt" or "messages"'
_TIMEOUT_S = 60.0
_OF_LONGER_ANSWERS = frozenset({"max_completion_tokens", "min_tokens", "n", "best_of", "stream_options"})
"""Fields of a request that do not go with an answer of one token."""


class RefusedError(CommandError):
    """vLLM has refused a request; it may take another one."""


def add_file(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The argument that names the file."""
    parser.add_argument(
        "file",
        type=Path,
        nargs=nargs,
        help="prompts, one in each line: JSON text, a JSON list of token ids, or an object of fields of a completion "
        'or chat request ("-": standard input)',
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model that is asked for."""
    parser.add_argument("--model", help="name of the model (the first one that vLLM serves)")


def read(file: Path, is_possible: Callable[[Any], bool], allowed: str) -> list[Any]:
    """The value of each line that is not empty. Raises CommandError."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file}: it cannot be read ({error})") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except ValueError:
            raise CommandError(f"{file}, line {number}: it is not JSON; allowed: {allowed}") from None
        if not is_possible(found[-1]):
            raise CommandError(f"{file}, line {number}: allowed: {allowed}")
    if not found:
        raise CommandError(f"{file}: it has no line")
    return found


def is_prompt(line: Any) -> bool:
    """Whether a line is a prompt."""
    if isinstance(line, dict):
        return "prompt" in line or "messages" in line
    is_ids = isinstance(line, list) and line and all(isinstance(one, int) for one in line)
    return bool(isinstance(line, str) or is_ids)


def complete(
    url: str, model: str, line: Any, fields: dict[str, Any], timeout_s: float | None = _TIMEOUT_S
) -> dict[str, Any]:
    """vLLM's answer of one token to a prompt, with further ``fields`` of the request. Raises CommandError."""
    given: dict[str, Any] = line if isinstance(line, dict) else {"prompt": line}
    request = {name: value for name, value in given.items() if name not in _OF_LONGER_ANSWERS}
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    return ask(url + path, {"model": model, **request, "max_tokens": 1, "stream": False, **fields}, timeout_s)


def first_model(url: str) -> str:
    """The first model that a vLLM serves. Raises CommandError."""
    models = ask(url + "/v1/models", None).get("data") or []
    if not models:
        raise CommandError(f"{url}: it serves no model")
    return str(models[0]["id"])


def ask(url: str, body: dict[str, Any] | None, timeout_s: float | None = _TIMEOUT_S) -> dict[str, Any]:
    """The JSON that a vLLM answers with. Raises CommandError."""
    content = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            found = json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:500]
        raise RefusedError(f"{url}: HTTP {error.code}: {text}") from None
    except (OSError, ValueError, HTTPException) as error:
        raise CommandError(f"{url}: no vLLM answers there ({error})") from None
    if not isinstance(found, dict):
        raise CommandError(f"{url}: no vLLM answers there (its answer is no object)")
    return found
