"""``undercroft bench lookup``: submit and poll of an all-hit prefix, from Python with the hashes as vLLM has them."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from undercroft.cli.output import CommandError

TOKENS_PER_BLOCK = 16
# Small payloads: a lookup never touches them, and a long prefix stays cheap to fill.
PAYLOAD_BYTES = 4096
# Polls timed together, since one is of the order of the clock's own cost.
POLLS = 100


def measure(keys: int, rounds: int) -> dict[str, Any]:
    """Times of ``rounds`` lookups of a prefix of ``keys`` blocks in an embedded engine."""
    from undercroft import _core

    hashes = block_hashes(keys)
    tokens = keys * TOKENS_PER_BLOCK
    engine = _core.Engine(host_memory=keys * PAYLOAD_BYTES * 2 + (64 << 20))
    try:
        session = engine.register(
            "undercroft bench lookup", [("full", TOKENS_PER_BLOCK, PAYLOAD_BYTES, 0)], TOKENS_PER_BLOCK
        )
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


def fill(session: Any, hashes: list[bytes]) -> None:
    """Save the prompt, whose bytes do not matter. Raises CommandError if not all of it is taken."""
    session.begin_save("fill", hashes, len(hashes) * TOKENS_PER_BLOCK)
    while not (grants := session.grants()):
        time.sleep(0.001)
    [(_, job_id, _, _, refused)] = grants
    if not job_id or refused:
        raise CommandError(f"the arena took fewer than {len(hashes)} blocks")
    session.end_save(job_id, True)
    session.finish("fill")


def _lookups(
    session: Any, hashes: list[bytes], tokens: int, rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Nanoseconds of each submit, of a poll, and from the start of submit to the answer."""
    clock = time.perf_counter_ns
    submit, poll, ready = [], [], []
    # A tenth more at the start warms the caches and is not counted.
    for index in range(-(rounds // 10), rounds):
        name = f"request-{index}"
        start = clock()
        session.submit(name, hashes)
        submitted = clock()
        answer = session.poll(name, hashes, 0)
        end = clock()
        if answer != tokens:
            raise CommandError(f"the lookup answered {answer} tokens where {tokens} are in host memory")
        again = clock()
        for _ in range(POLLS):
            session.poll(name, hashes, 0)
        polled = (clock() - again) / POLLS
        session.discard(name)
        if index >= 0:
            submit.append(float(submitted - start))
            ready.append(float(end - start))
            poll.append(polled)
    return submit, poll, ready


def percentile(values: list[float], percent: int) -> float:
    """The value that ``percent`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
