"""The savings of a cache: what its hits save on a machine, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undercroft import capacity
from undercroft.capacity import Group
from undercroft.estimate.replay import Outcome

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of the machine, in bytes a second unless said otherwise. None: unknown."""

    prefill_tokens: int | None
    """Prompt tokens that vLLM computes in a second."""
    copy: int
    """Copies from host memory to the device."""
    disk_read: int | None
    disk_write: int | None
    disk_writes_per_day: float
    """How many times a day the disk may be written as a whole over its life."""
    remote_read: int = 1
    """Reads of the remote store by one host."""
    remote_latency_s: float = 0.0
    """Seconds until the first byte of a hit arrives from the remote store."""


@dataclass(frozen=True, slots=True)
class Savings:
    """Times and bytes of one case. None where a rate or the time of the trace is unknown."""

    prefill_seconds_avoided: float | None
    """Time in which vLLM would have computed the hits."""
    load_seconds: float | None
    """Time of the loads of all hits."""
    net_seconds_saved: float | None
    """Time avoided less the time of loads. A tier that is loaded more slowly than computed saves nothing: vLLM computes
    these tokens instead."""
    disk_write_bytes: int
    disk_dropped_bytes: int
    """Bytes that the disk had no time to write."""
    disk_write_bytes_per_day: int | None
    disk_writes_per_day: float | None
    """How many times a day the disk is written as a whole."""
    disk_busy_percent: float | None
    """Time of the disk's reads and writes in percent of the trace's time."""


def savings(
    outcome: Outcome, groups: Sequence[Group], disk: int, disk_tokens: int, seconds: float, machine: Machine
) -> Savings:
    """The savings of a replay of ``seconds``, with a disk of ``disk`` bytes that hold ``disk_tokens`` tokens.

    For several hosts, ``seconds`` are those of all hosts together: bytes a day and the disk's time are of one host.
    """
    token, boundary = capacity.token_bytes(groups), capacity.boundary_bytes(groups)
    host_bytes = outcome.host_tokens * token + outcome.host_hits * boundary
    disk_bytes = outcome.disk_tokens * token + outcome.disk_hits * boundary
    host_load = host_bytes / machine.copy
    disk_load: float | None = 0.0
    if disk_bytes:
        disk_load = disk_bytes / machine.disk_read + disk_bytes / machine.copy if machine.disk_read else None
    remote_load = remote_load_seconds(outcome, groups, machine)
    # The bytes that a tier of this size writes, with windows and states.
    each = disk / disk_tokens if disk_tokens else 0.0
    written = outcome.disk_write_tokens * each
    daily = written / seconds * DAY_S if seconds else None
    avoided = net = None
    if machine.prefill_tokens:
        avoided = outcome.hit_tokens / machine.prefill_tokens
        if disk_load is not None:
            net = max(0.0, outcome.host_tokens / machine.prefill_tokens - host_load)
            net += max(0.0, outcome.disk_tokens / machine.prefill_tokens - disk_load)
            net += max(0.0, outcome.remote_tokens / machine.prefill_tokens - remote_load)
    busy = None
    if disk and seconds and machine.disk_read and machine.disk_write:
        busy = 100 * (disk_bytes / machine.disk_read + written / machine.disk_write) / seconds
    return Savings(
        prefill_seconds_avoided=avoided,
        load_seconds=None if disk_load is None else host_load + disk_load + remote_load,
        net_seconds_saved=net,
        disk_write_bytes=int(written),
        disk_dropped_bytes=int(outcome.disk_dropped_tokens * each),
        disk_write_bytes_per_day=None if daily is None else int(daily),
        disk_writes_per_day=None if daily is None or not disk else daily / disk,
        disk_busy_percent=busy,
    )


def remote_load_seconds(outcome: Outcome, groups: Sequence[Group], machine: Machine) -> float:
    """Time of the loads of all hits in the remote store."""
    token, boundary = capacity.token_bytes(groups), capacity.boundary_bytes(groups)
    loaded = outcome.remote_tokens * token + outcome.remote_hits * boundary
    return loaded / machine.remote_read + outcome.remote_hits * machine.remote_latency_s + loaded / machine.copy
