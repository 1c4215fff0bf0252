"""Traces of prefix blocks, as Mooncake publishes them and the option ``record`` writes: one JSON object a line for each
request.

``timestamp``: milliseconds; ``input_length``: tokens of the prompt; ``hash_ids``: a number for each block, which is the
same only for blocks with equal content and equal tokens before them. A recorded trace begins with a line that has
``block_tokens``, and its ``hash_ids`` are the numbers of all full blocks, of generated tokens too. Without this line
blocks have 512 tokens, and ``hash_ids`` are the numbers of the prompt's blocks, the last of which may not be full.
A line may name its session (``session_id``, ``session``, ``user_id`` or ``user``), by which a router can choose a host.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undercroft.errors import ConfigError, cause

FORMAT = "undercroft_trace"
VERSION = 1
MOONCAKE_BLOCK_TOKENS = 512
SESSION_FIELDS = ("session_id", "session", "user_id", "user")
"""The first of these that a line has is its session."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    time_s: float
    tokens: int
    """Tokens of the prompt."""
    prompt_blocks: int
    """Number of leading blocks that a lookup of the prompt covers."""
    blocks: list[int]
    """Numbers of the full blocks."""
    cached: int | None
    """Tokens of the prompt that were not computed; None if the trace does not have this number."""
    session: int | None = None
    """A number of the request's session; None if the trace does not name it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    block_tokens: int
    requests: list[Request] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].time_s - self.requests[0].time_s if self.requests else 0.0

    @property
    def unique_blocks(self) -> int:
        """Number of different blocks in all requests."""
        return len({block for request in self.requests for block in request.blocks})

    @property
    def cached_percent(self) -> float | None:
        """Percent of the prompt tokens that were not computed at the recording; None if the trace does not have it."""
        if not self.requests or any(request.cached is None for request in self.requests):
            return None
        return 100 * sum(request.cached or 0 for request in self.requests) / max(1, self.tokens)


def read(path: Path, block_tokens: int | None = None) -> Trace:
    """The trace in a file. ``block_tokens``: for files without this number. Raises ConfigError."""
    requests: list[Request] = []
    found: int | None = None
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
            if FORMAT in value:
                found = _header(value, found, where)
                continue
            requests.append(_request(value, found or block_tokens or MOONCAKE_BLOCK_TOKENS, recorded=found is not None))
        except (ValueError, TypeError, KeyError) as error:
            if number > 1 and not line.endswith("\n"):
                break  # a killed vLLM wrote part of its last line
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"{where}: {reason}; expected an object with timestamp (milliseconds), input_length (tokens) and "
                "hash_ids (a number for each block)"
            ) from None
    if not any(request.blocks for request in requests):
        raise ConfigError(f"{path} holds no request with a full block: there is nothing to replay")
    requests.sort(key=lambda request: request.time_s)
    return Trace(found or block_tokens or MOONCAKE_BLOCK_TOKENS, requests)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {cause(error)}") from None


def _header(value: dict[str, Any], before: int | None, where: str) -> int:
    """The tokens of a block. A file from several starts of vLLM has a header for each start."""
    if value[FORMAT] != VERSION:
        raise ConfigError(f"{where}: a trace of version {value[FORMAT]!r}; this undercroft reads version {VERSION}")
    tokens = value["block_tokens"]
    if not isinstance(tokens, int) or tokens < 1 or before not in (None, tokens):
        raise ConfigError(f"{where}: blocks of {tokens} tokens after blocks of {before}; estimate each part by itself")
    return tokens


def _request(value: dict[str, Any], block_tokens: int, *, recorded: bool) -> Request:
    tokens, blocks = int(value["input_length"]), value["hash_ids"]
    if tokens < 0 or not all(isinstance(block, int) and 0 <= block < 1 << 64 for block in blocks):
        raise ValueError("a negative length, or a block that is no number")
    if not recorded:
        blocks = blocks[: tokens // block_tokens]
    prompt = min(len(blocks), tokens // block_tokens)
    cached = value.get("cached")
    return Request(
        float(value["timestamp"]) / 1e3,
        tokens,
        prompt,
        blocks,
        cached=None if cached is None else int(cached),
        session=_session(value),
    )


def _session(value: dict[str, Any]) -> int | None:
    name = next((value[field] for field in SESSION_FIELDS if value.get(field) is not None), None)
    if name is None:
        return None
    return int.from_bytes(hashlib.blake2b(str(name).encode(errors="replace"), digest_size=8).digest(), "little")
