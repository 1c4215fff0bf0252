"""The vLLM to which a command sends prompts over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from undercroft.cli import arguments
from undercroft.cli.output import CommandError
from undercroft.errors import ConfigError

_TIMEOUT_S = 60.0
_OF_LONGER_ANSWERS = frozenset({"max_completion_tokens", "min_tokens", "n", "best_of", "stream_options"})
"""Fields of a request that conflict with an answer of one token."""
_LATIN_1_MAX = 0xFF


class RefusedError(CommandError):
    """vLLM has refused a request. It may accept the next request."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """A vLLM at an address. Each method raises CommandError if no vLLM answers."""

    url: str
    api_key: str | None

    def __post_init__(self) -> None:
        headers(self.api_key)

    def first_model(self) -> str:
        """The first model that the vLLM serves."""
        models = self._ask("/v1/models", None, _TIMEOUT_S).get("data") or []
        if not models:
            raise CommandError(f"{self.url}: it serves no model")
        return str(models[0]["id"])

    def complete(
        self, model: str, line: Any, fields: dict[str, Any], timeout_s: float | None = _TIMEOUT_S
    ) -> dict[str, Any]:
        """Send a prompt with further ``fields`` of the request. Returns the answer, which has one token."""
        given: dict[str, Any] = line if isinstance(line, dict) else {"prompt": line}
        request = {name: value for name, value in given.items() if name not in _OF_LONGER_ANSWERS}
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        return self._ask(path, {"model": model, **request, "max_tokens": 1, "stream": False, **fields}, timeout_s)

    def _ask(self, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> dict[str, Any]:
        """Send a request. Returns the JSON object of the answer."""
        content = None if body is None else json.dumps(body).encode()
        place = self.url + path
        try:
            request = urllib.request.Request(place, content, headers(self.api_key))
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                found = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.UNAUTHORIZED:
                raise CommandError(f"{place}: vLLM asks for its key; give --api-key, or set OPENAI_API_KEY") from None
            raise RefusedError(f"{place}: HTTP {error.code}: {text_of(error)}") from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise CommandError(f"{place}: no vLLM answers there ({reason})") from None
        if not isinstance(found, dict):
            raise CommandError(f"{place}: no vLLM answers there (its answer is no object)")
        return found


def add_arguments(parser: argparse.ArgumentParser, place: argparse._ActionsContainer | None = None) -> None:
    """Add the arguments that name a vLLM and its model. ``place``: the group for the address's argument."""
    (place or parser).add_argument(
        "--url", type=arguments.url, default="http://localhost:8000", help="address of vLLM (%(default)s)"
    )
    add_api_key(parser)
    parser.add_argument("--model", help="name of the model (the first one that vLLM serves)")


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """Add the argument with the key that a vLLM with --api-key requires."""
    parser.add_argument("--api-key", metavar="KEY", help="as vLLM was given it (default: $OPENAI_API_KEY)")


def text_of(error: urllib.error.HTTPError) -> str:
    """The beginning of the text of an answer whose status is an error; empty if the text cannot be read."""
    try:
        return error.read().decode(errors="replace").strip()[:500]
    except (OSError, HTTPException):
        return ""


def headers(api_key: str | None) -> dict[str, str]:
    """The headers of a request to a vLLM. Raises ConfigError for a key that no header can hold."""
    key = api_key or os.environ.get("OPENAI_API_KEY")
    # The message of http.client would show the key.
    if key and (not key.isprintable() or max(map(ord, key)) > _LATIN_1_MAX):
        raise ConfigError(
            f"{'--api-key' if api_key else 'OPENAI_API_KEY'}: the key has a line break, or another character that an "
            "HTTP header cannot hold; give the key alone"
        )
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
