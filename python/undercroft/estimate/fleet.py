"""The replay of a trace on many hosts behind a router, with the remote store that they share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from undercroft import capacity
from undercroft.capacity import Group
from undercroft.errors import ConfigError
from undercroft.estimate.replay import Outcome, Tiers
from undercroft.estimate.trace import Trace
from undercroft.units import format_size

HASH_BLOCKS_MAX = 64
"""Most blocks of an object, as in the engine."""
HEADER_BYTES = 4096
PEAK_S = 60.0
"""Seconds of the busiest time."""
HOST_BYTES = 6 << 20
"""Bytes of an engine without blocks."""


@dataclass(frozen=True, slots=True)
class Objects:
    """How prefixes are cut into objects of the store, and a trace's blocks into blocks of the replay."""

    parts: int
    """Blocks of the replay in a block of the trace."""
    blocks: int
    """Blocks of the replay in an object."""
    tokens: float
    """Tokens of an object."""
    size: int
    """Bytes of an object."""


@dataclass(frozen=True, slots=True)
class Store:
    """The remote store and its use. Without objects there is no store."""

    objects: int
    write: str
    write_tokens_s: float
    """Tokens a second that a host may write; 0 if it writes each block at once."""


@dataclass(frozen=True, slots=True)
class StoreLoad:
    """The work of the store."""

    requests: int
    peak_requests_s: float
    """Requests a second in the busiest minute."""
    read_bytes: int
    write_bytes: int
    peak_bytes_s: float
    evicted_objects: int
    dropped_objects: int
    """Objects that hosts had no time or memory to write."""


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """The hits of all hosts together, and the work of the store."""

    outcome: Outcome
    busiest_percent: float
    """Requests of the host with the most, in percent of all."""
    store: StoreLoad


def objects_of(trace: Trace, groups: Sequence[Group], object_bytes: int) -> Objects:
    """The objects of at least ``object_bytes`` that a model's prefixes are cut into, as the engine cuts them."""
    block = max(group.block_tokens for group in groups)
    block_bytes = block * capacity.token_bytes(groups)
    if not block_bytes:
        raise ConfigError("a model without full attention does not use a remote store")
    blocks = 1
    while blocks * block_bytes < object_bytes and 2 * blocks <= HASH_BLOCKS_MAX:
        blocks *= 2
    tokens = blocks * block
    # An object is a block of the replay, or several: so hits end where they end in an engine.
    parts = max(1, round(trace.block_tokens / tokens))
    of_object = 1 << max(0, round(math.log2(tokens * parts / trace.block_tokens)))
    of_object = min(of_object, HASH_BLOCKS_MAX)
    tokens_of_object = of_object * trace.block_tokens / parts
    return Objects(parts, of_object, tokens_of_object, int(tokens_of_object * block_bytes / block) + HEADER_BYTES)


def replay_fleet(
    trace: Trace,
    tiers: Tiers,
    store: Store,
    objects: Objects,
    hosts: int,
    router: str,
    progress: Callable[[int], object] | None = None,
) -> FleetOutcome:
    """Serve the requests in order of arrival, each on the host that the router chooses."""
    from undercroft import _core

    size = trace.block_tokens
    fleet = _core.Fleet(
        hosts=hosts,
        router=router,
        parts=objects.parts,
        host_blocks=tiers.host_tokens // size,
        disk_blocks=tiers.disk_tokens // size,
        second_touch=tiers.second_touch,
        disk_writes_per_s=tiers.disk_write_tokens_s / size,
        store_objects=store.objects,
        object_blocks=objects.blocks,
        store_write=store.write,
        store_writes_per_s=store.write_tokens_s / size,
    )
    found, hits, served = [0, 0, 0], [0, 0, 0], Counter[int]()
    start = trace.requests[0].time_s
    for request in trace.requests:
        session = request.session
        if session is None:
            session = request.blocks[0] if request.blocks else 0
        host, *tokens = fleet.request(request.time_s - start, session, request.prompt_blocks, request.blocks)
        served[host] += 1
        found = [before + more for before, more in zip(found, tokens, strict=True)]
        # A hit counts for the slowest tier that a part of it comes from.
        slowest = max((tier for tier, of in enumerate(tokens) if of), default=None)
        if slowest is not None:
            hits[slowest] += 1
        if progress is not None:
            progress(1)
    counts = fleet.counts()
    each = size / objects.parts
    outcome = Outcome(
        tokens=trace.tokens,
        host_tokens=round(found[0] * each),
        disk_tokens=round(found[1] * each),
        host_hits=hits[0],
        disk_hits=hits[1],
        disk_write_tokens=round(counts["disk_writes"] * each),
        disk_dropped_tokens=round(counts["disk_dropped"] * each),
        remote_tokens=round(found[2] * each),
        remote_hits=hits[2],
    )
    busiest = 100 * max(served.values(), default=0) / max(1, len(trace.requests))
    return FleetOutcome(outcome, busiest, _load(counts, objects, trace))


def _load(counts: dict[str, int], objects: Objects, trace: Trace) -> StoreLoad:
    block_bytes = objects.size / objects.blocks
    peak_s = min(PEAK_S, trace.seconds)
    return StoreLoad(
        requests=counts["gets"] + counts["probes"] + counts["puts"],
        peak_requests_s=counts["peak_requests"] / peak_s,
        read_bytes=int(counts["read_blocks"] * block_bytes),
        write_bytes=int(counts["written_blocks"] * block_bytes),
        peak_bytes_s=counts["peak_blocks"] * block_bytes / peak_s,
        evicted_objects=counts["evicted_objects"],
        dropped_objects=counts["store_dropped"],
    )


def objects_in(size: int, objects: Objects) -> int:
    """The objects that a store of this size holds; 0 for none. Raises ConfigError if not even one fits."""
    if size and size < objects.size:
        raise ConfigError(
            f"--remote {format_size(size)} holds no object: an object of this model has {format_size(objects.size)}; "
            "give more"
        )
    return size // objects.size
