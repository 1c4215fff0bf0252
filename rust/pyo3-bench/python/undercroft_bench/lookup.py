"""``undercroft bench lookup``: prefetch and lookup of an all-hit prefix, from Python with hashes as in vLLM."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from undercroft.cli.output import CommandError
from undercroft.errors import ConfigError
from undercroft.units import format_size

if TYPE_CHECKING:
    from undercroft._core import SaveGrant, Session

TOKENS_PER_BLOCK = 16
# Small payloads: a lookup never touches them, and a long prefix stays cheap to fill.
PAYLOAD_BYTES = 4096
# Lookups timed together, since one that is repeated is of the order of the clock's own cost.
POLLS = 100


class Group(NamedTuple):
    """A KV cache group, as `_core.Engine.register` takes it."""

    kind: str
    block_tokens: int
    payload_bytes: int
    window_tokens: int = 0


GROUPS = [Group("full", TOKENS_PER_BLOCK, PAYLOAD_BYTES)]


def measure(keys: int, rounds: int) -> dict[str, Any]:
    """Times of ``rounds`` lookups of a prefix of ``keys`` blocks in an embedded engine."""
    from undercroft import _core

    tokens = keys * TOKENS_PER_BLOCK
    memory = keys * PAYLOAD_BYTES * 2 + (64 << 20)
    try:
        engine = _core.Engine({"host_memory": memory})
    except ConfigError as error:
        raise ConfigError(
            f"--keys {keys}: {format_size(memory)} of memory are needed; give fewer keys ({error})"
        ) from None
    try:
        hashes = block_hashes(keys)
        session = engine.register("undercroft bench lookup", GROUPS, TOKENS_PER_BLOCK)
        fill(session, hashes)
        submit, poll, ready = _lookups(session, hashes, tokens, rounds)
        session.close()
    finally:
        engine.close()
    return {
        "mode": "embedded",
        "keys": keys,
        "rounds": rounds,
        "submit_p50_us": percentile(submit, 50) / 1e3,
        "submit_p99_us": percentile(submit, 99) / 1e3,
        "poll_p50_ns": percentile(poll, 50),
        "ready_p50_us": percentile(ready, 50) / 1e3,
        "ready_p99_us": percentile(ready, 99) / 1e3,
    }


def block_hashes(keys: int) -> list[bytes]:
    """The hashes of the prompt that is looked up."""
    return [hashlib.sha256(index.to_bytes(8, "little")).digest() for index in range(keys)]


def fill(session: Session, hashes: list[bytes]) -> None:
    """Save the prompt, whose bytes do not matter. Raises CommandError if not all of it is taken."""
    save(session, "fill", hashes, len(hashes) * TOKENS_PER_BLOCK)


def save(session: Session, request_id: str, hashes: list[bytes], tokens: int) -> None:
    """Save a prompt of which nothing is cached. Raises CommandError if not all of it is taken."""
    grant = session.begin_save(request_id, hashes, tokens)
    while grant is not None and grant.pending:
        time.sleep(0.001)
        grant = _granted(session, grant)
    if grant is None or not grant.extents or grant.refused:
        raise CommandError(f"the arena took fewer than {len(hashes)} blocks")
    session.end_transfer(grant.transfer_id, True)
    session.finish_request(request_id)


def _granted(session: Session, pending: SaveGrant) -> SaveGrant:
    grants = (grant for grant in session.poll_saves() if grant.transfer_id == pending.transfer_id)
    return next(grants, pending)


def _lookups(
    session: Session, hashes: list[bytes], tokens: int, rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Nanoseconds of each prefetch, of a repeated lookup, and from the start of the prefetch to the answer."""
    clock = time.perf_counter_ns
    submit, poll, ready = [], [], []
    # A tenth more at the start warms the caches and is not counted.
    for index in range(-(rounds // 10), rounds):
        name = f"request-{index}"
        start = clock()
        session.prefetch(name, hashes)
        submitted = clock()
        answer = session.lookup(name, hashes)
        end = clock()
        if answer.tokens != tokens:
            raise CommandError(f"the lookup answered {answer.tokens} tokens where {tokens} are in host memory")
        again = clock()
        for _ in range(POLLS):
            session.lookup(name, hashes)
        polled = (clock() - again) / POLLS
        session.finish_request(name)
        if index >= 0:
            submit.append(float(submitted - start))
            ready.append(float(end - start))
            poll.append(polled)
    return submit, poll, ready


def percentile(values: list[float], percent: int) -> float:
    """The value that ``percent`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
