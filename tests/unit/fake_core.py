"""The engine's Python interface over plain dicts: for tests of the scheduler's half without the compiled core.

Groups of kind "full" only. `lower` moves payloads to a pretended disk: they are pending until `promote`.
"""

from __future__ import annotations

import itertools
import struct
from types import SimpleNamespace

SLOT = 4096


def extent(group, first_block, offsets):
    return SimpleNamespace(group=group, first_block=first_block, offsets=struct.pack(f"<{len(offsets)}q", *offsets))


def save_grant(transfer_id, extents, refused, *, pending=False):
    return SimpleNamespace(
        transfer_id=transfer_id,
        pending=pending,
        session=0,
        extents=extents,
        refused="host_full" if refused else None,
    )


class FakeEngine:
    def __init__(self, capacity: int = 10_000, **options):
        self.options = options
        self.capacity = capacity
        self.arena = SimpleNamespace(socket="/fake.sock", arena_id=7, session=0)
        self.is_shared = False
        self.took_over = False
        self.closed = False
        self.counters = {"saved_blocks": 0, "host_used_bytes": 0}

    def register(self, description, groups, hash_block_size, alignment_tokens=None, dropped_tokens=0):
        session = FakeSession(self, description, groups, hash_block_size)
        session.alignment = alignment_tokens or hash_block_size
        session.dropped = dropped_tokens
        return session

    def stats(self):
        return dict(self.counters)

    def info(self):
        return {"host_memory": 1 << 30, "huge_pages": False, "disks": [], "io_engine": "thread_pool"}

    def connection(self):
        return ("up", "")

    def close(self):
        self.closed = True


class FakeSession:
    def __init__(self, engine, description, groups, hash_block_size):
        self.engine = engine
        self.groups = groups
        self.hash_block_size = hash_block_size
        self.namespace = "ab" * 32
        self.host: dict[tuple[int, bytes], int] = {}  # (group, last hash of the block) -> arena offset
        self.disk: set[tuple[int, bytes]] = set()
        self.promoted: dict[tuple[int, bytes], str] = {}  # payload -> where it was read from
        self.reserved: dict[tuple[int, bytes], int] = {}  # payload -> save job
        self.lookups: dict[str, list[bytes]] = {}
        self.failed: set[str] = set()
        self.waits: dict[str, tuple] = {}  # pending lookups
        self.reasons: dict[str, tuple[str, int | None]] = {}
        self.loads: dict[int, str] = {}
        self.saves: dict[int, list[tuple[tuple[int, bytes], int]]] = {}
        self.jobs = itertools.count(1)
        self.slots = itertools.count(0)
        self.granted: list[tuple] = []
        self.gone: set[str] = set()
        self.calls: list[tuple] = []
        self.closed = False
        self.steps: list[tuple] = []
        self.turn_ends: dict[str, int] = {}

    # Test controls

    def lower(self):
        """Everything is on disk only from now on."""
        self.disk.update(self.host)

    is_slow = False
    """Whether grants are on their way, as from a server."""
    delivers = False
    """Whether the disk delivers while a caller waits."""

    def promote(self, source="disk"):
        """The disk has delivered, or the remote store."""
        self.promoted |= dict.fromkeys(self.disk, source)
        self.disk.clear()

    # Interface

    def report_steps(self, steps):
        self.steps.extend(steps)

    def wait(self, request_id, timeout_s):
        self.calls.append(("wait", request_id, timeout_s))
        if self.delivers:
            self.promote()
        return self.delivers

    def ended_waits(self):
        ended = [name for name, question in self.waits.items() if not self._answer(name, *question).pending]
        for name in ended:
            del self.waits[name]
        return ended

    def _payload(self, group, hashes, index):
        step = self.groups[group].block_tokens // self.hash_block_size
        return (group, hashes[(index + 1) * step - 1])

    def _boundary(self, hashes):
        tokens = 0
        for end in range(1, len(hashes) + 1):
            for group, block in enumerate(of.block_tokens for of in self.groups):
                if block and end * self.hash_block_size % block == 0:
                    index = end * self.hash_block_size // block - 1
                    if self._payload(group, hashes, index) not in self.host:
                        return tokens
            tokens = end * self.hash_block_size
        return tokens

    def prefetch(self, request_id, hashes, num_computed_tokens=0, max_tokens=None, wait_ms=None, min_tokens=0, *plan):
        self.calls.append(("prefetch", request_id, num_computed_tokens, max_tokens))
        return self._answer(request_id, hashes, num_computed_tokens, max_tokens, wait_ms, min_tokens).shared_tokens

    def lookup(self, request_id, hashes, num_computed_tokens=0, max_tokens=None, wait_ms=None, min_tokens=0, *plan):
        self.calls.append(("lookup", request_id, num_computed_tokens, max_tokens))
        question = hashes, num_computed_tokens, max_tokens, wait_ms, min_tokens
        answer = self._answer(request_id, *question)
        if answer.pending:
            self.waits[request_id] = question
        return SimpleNamespace(pending=True, tokens=0, shared_tokens=0) if answer.pending else answer

    def _answer(self, request_id, hashes, num_computed_tokens, max_tokens, wait_ms, min_tokens):
        if request_id in self.failed:
            return SimpleNamespace(pending=False, tokens=0, shared_tokens=0)
        self.lookups[request_id] = list(hashes)
        shared = self._boundary(hashes)
        boundary = max(0, min(shared - self.dropped, max_tokens or 1 << 30))
        boundary = boundary // self.alignment * self.alignment
        if boundary < min_tokens:
            return SimpleNamespace(pending=False, tokens=0, shared_tokens=boundary)
        owed = [
            self._payload(group, hashes, index)
            for group, block in enumerate(of.block_tokens for of in self.groups)
            if block
            for index in range(num_computed_tokens // block, boundary // block)
        ]
        missing = [at for at, payload in enumerate(owed) if payload in self.disk]
        if missing and wait_ms == (0.0, 0.0):
            boundary, missing = num_computed_tokens + missing[0] * self.hash_block_size, []
        pending = bool(missing)
        tokens = 0 if pending or boundary <= num_computed_tokens else boundary
        return SimpleNamespace(pending=pending, tokens=tokens, shared_tokens=shared)

    def begin_load(self, request_id, num_computed_tokens, num_external_tokens):
        self.calls.append(("begin_load", request_id, num_computed_tokens, num_external_tokens))
        if request_id in self.gone:
            return None
        hashes = self.lookups[request_id]
        plan = []
        for group, block in enumerate(of.block_tokens for of in self.groups):
            if not block:
                continue
            first, last = num_computed_tokens // block, (num_computed_tokens + num_external_tokens) // block
            offsets = [self.host[self._payload(group, hashes, index)] for index in range(first, last)]
            plan.append(extent(group, first, offsets))
        transfer = next(self.jobs)
        self.loads[transfer] = request_id
        first, last = num_computed_tokens // self.hash_block_size, num_computed_tokens + num_external_tokens
        read = [self.promoted.get((0, hashes[index])) for index in range(first, last // self.hash_block_size)]
        disk, remote = (read.count(source) * self.hash_block_size for source in ("disk", "remote"))
        return SimpleNamespace(
            transfer_id=transfer,
            session=0,
            extents=plan,
            host_tokens=num_external_tokens - disk - remote,
            disk_tokens=disk,
            remote_tokens=remote,
        )

    def begin_save(self, request_id, hashes, num_tokens, offers=(), wanted=False):
        self.calls.append(("begin_save", request_id, num_tokens))
        refused = False
        job, plan, taken = next(self.jobs), [], []
        for group, block in enumerate(of.block_tokens for of in self.groups):
            if not block:
                continue
            offsets = []
            for index in range(num_tokens // block):
                payload = self._payload(group, hashes, index)
                if payload in self.host or payload in self.reserved:
                    offsets.append(-1)
                elif len(self.host) + len(self.reserved) >= self.engine.capacity:
                    refused = True
                    offsets.append(-1)
                else:
                    slot = next(self.slots) * SLOT
                    self.reserved[payload] = job
                    taken.append((payload, slot))
                    offsets.append(slot)
            plan.append(extent(group, 0, offsets))
        if taken:
            self.saves[job] = taken
        grant = save_grant(job, plan if taken else [], refused)
        if not self.is_slow:
            return grant
        self.granted.append(grant)
        return save_grant(job, [], False, pending=True)

    def poll_saves(self):
        if self.is_slow:
            return []
        granted, self.granted = self.granted, []
        return granted

    def end_transfer(self, transfer_id, ok):
        self.calls.append(("end_transfer", transfer_id, ok))
        if transfer_id in self.loads:
            request_id = self.loads.pop(transfer_id)
            if not ok:
                self.failed.add(request_id)
            return
        for payload, slot in self.saves.pop(transfer_id):
            del self.reserved[payload]
            if ok:
                self.host[payload] = slot
                self.engine.counters["saved_blocks"] += 1

    def give_up(self, transfer_id, reason):
        self.calls.append(("give_up", transfer_id, reason))
        if self.loads.pop(transfer_id, None) is None:
            for payload, _ in self.saves.pop(transfer_id):
                del self.reserved[payload]

    def rest(self, request_id):
        return self.reasons.get(request_id)

    def end_lookup(self, request_id):
        self.calls.append(("end_lookup", request_id))
        self.waits.pop(request_id, None)
        self.lookups.pop(request_id, None)

    def finish_request(self, request_id, turn_end=0):
        self.calls.append(("finish_request", request_id))
        self.turn_ends[request_id] = turn_end
        self.waits.pop(request_id, None)
        self.lookups.pop(request_id, None)

    def reset(self, timeout_s=10.0):
        self.host.clear()
        self.disk.clear()
        return True

    def change_weights(self, description=None):
        self.calls.append(("change_weights", description))
        self.lookups.clear()
        self.host, self.disk = {}, set()

    def close(self):
        self.closed = True
