"""A client of a running vLLM server, with the requests of `undercroft bench serve`."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from undercroft.cli import vllm_http
from undercroft.cli.output import CommandError

TIMEOUT_S = 600.0
_DEVICE = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    ttft_s: float
    """From sending the request to the first token."""
    prompt_tokens: int
    cached_tokens: int | None
    """Tokens of the prompt; None if the server does not say (--enable-prompt-tokens-details)."""


class _StatusError(CommandError):
    """The server has answered with a status that is an error."""

    def __init__(self, place: str, code: int, text: str) -> None:
        super().__init__(f"{place}: HTTP {code} {text}".rstrip())
        self.code = code


class VllmClient:
    """One server. Each method raises CommandError if the server does not do as asked."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = vllm_http.headers(api_key)

    def model(self) -> str:
        """The name of the model that it serves, the first if there are adapters."""
        return str(self._first_model()["id"])

    def longest_request(self, max_tokens: int) -> int | None:
        """Tokens of the longest prompt that leaves room for an answer of this length; None if the server does not
        say."""
        longest = self._first_model().get("max_model_len")
        return None if longest is None else max(1, int(longest) - max_tokens)

    def count_tokens(self, model: str, text: str) -> int:
        """Tokens of a text in the model's own tokenizer."""
        return int(self._field("count", "/tokenize", {"model": model, "prompt": text}))

    def token_ids(self, model: str, text: str) -> list[int]:
        """The tokens themselves."""
        return list(self._field("tokens", "/tokenize", {"model": model, "prompt": text}))

    def device_tokens(self) -> int | None:
        """Tokens that the device's own prefix cache holds; None if the server does not say."""
        with self._open("/metrics") as response:
            found = _DEVICE.search(response.read().decode(errors="replace"))
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}
        try:
            return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        except (KeyError, ValueError):
            return None

    def reset_device_cache(self, patience_s: float = 30.0) -> bool:
        """Empty the device's own prefix cache. False if the server has no such endpoint (VLLM_SERVER_DEV_MODE)."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                with self._open("/reset_prefix_cache", {}) as response:
                    body = response.read()
                    # It is refused while blocks are being saved.
                    if not body or json.loads(body).get("success", True):
                        return True
            except _StatusError as error:
                if error.code in (404, 405):
                    return False
                raise
            if time.monotonic() > deadline:
                raise CommandError("the server refuses to empty the device's prefix cache: it serves other requests")
            time.sleep(0.1)

    def complete(self, model: str, prompt: str | list[int], max_tokens: int) -> Answer:
        """Send a completion request with a text or token ids, and read its tokens as they come."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        first = None
        usage: dict[str, Any] = {}
        with self._open("/v1/completions", body) as response:
            for event in _events(response):
                if event.get("choices") and first is None:
                    first = time.perf_counter() - start
                usage = event.get("usage") or usage
            if first is None or not usage:
                raise CommandError("/v1/completions: the answer held no tokens")
            details = usage.get("prompt_tokens_details") or {}
            return Answer(first, int(usage["prompt_tokens"]), details.get("cached_tokens"))

    def _first_model(self) -> dict[str, Any]:
        models: list[dict[str, Any]] = self._field("data", "/v1/models")
        if not models:
            raise CommandError(f"{self._url} serves no model")
        return models[0]

    def _field(self, name: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """A field of the JSON object that the server answers."""
        with self._open(path, body) as response:
            return json.load(response)[name]

    @contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """The answer to a request. Raises CommandError also for errors of the ``with`` statement's body, which reads
        the answer."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise _StatusError(self._url + path, error.code, vllm_http.text_of(error)) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise CommandError(f"{self._url} does not answer ({reason}); give the URL of a running vLLM") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise CommandError(f"{self._url}{path} answers otherwise than vLLM: is it a vLLM server?") from None


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in lines:
        name, _, data = line.strip().partition(b": ")
        if name == b"data" and data != b"[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise CommandError(f"the server answered {event['error']}")
            yield event
