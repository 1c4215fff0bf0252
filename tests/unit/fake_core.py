"""The engine's Python interface over plain dicts: for tests of the scheduler's half without the compiled core.

Groups of kind "full" only. `lower` moves payloads to a pretended disk: they are owed until `promote`.
"""

from __future__ import annotations

import itertools
import struct

SLOT = 4096


class FakeEngine:
    def __init__(self, capacity: int = 10_000, **options):
        self.options = options
        self.capacity = capacity
        self.arena = ("/fake.sock", 7, 0)
        self.is_shared = False
        self.took_over = False
        self.closed = False
        self.counters = {"saved_blocks": 0, "host_used_bytes": 0}

    def register(self, description, groups, hash_block_tokens, alignment_tokens=None, dropped_tokens=0):
        session = FakeSession(self, description, groups, hash_block_tokens)
        session.alignment = alignment_tokens or hash_block_tokens
        session.dropped = dropped_tokens
        return session

    def stats(self):
        return dict(self.counters)

    def info(self):
        return {"host_memory": 1 << 30, "huge_pages": False, "disks": [], "io_engine": "thread_pool"}

    def link(self):
        return ("up", "")

    def close(self):
        self.closed = True


class FakeSession:
    def __init__(self, engine, description, groups, hash_tokens):
        self.engine = engine
        self.groups = groups
        self.hash_tokens = hash_tokens
        self.namespace = "ab" * 32
        self.host: dict[tuple[int, bytes], int] = {}  # (group, last hash of the block) -> arena offset
        self.disk: set[tuple[int, bytes]] = set()
        self.promoted: set[tuple[int, bytes]] = set()
        self.reserved: dict[tuple[int, bytes], int] = {}  # payload -> save job
        self.lookups: dict[str, list[bytes]] = {}
        self.failed: set[str] = set()
        self.loads: dict[int, str] = {}
        self.saves: dict[int, list[tuple[tuple[int, bytes], int]]] = {}
        self.jobs = itertools.count(1)
        self.slots = itertools.count(0)
        self.granted: list[tuple] = []
        self.gone: set[str] = set()
        self.calls: list[tuple] = []
        self.closed = False

    # Test controls

    def lower(self):
        """Everything is on disk only from now on."""
        self.disk.update(self.host)

    is_slow = False
    """Whether grants are on their way, as from a server."""
    delivers = False
    """Whether the disk delivers while somebody waits."""

    def promote(self):
        """The disk has delivered."""
        self.promoted |= self.disk
        self.disk.clear()

    # Interface

    def wait(self, request_id, timeout_s):
        self.calls.append(("wait", request_id, timeout_s))
        if self.delivers:
            self.promote()
        return self.delivers

    def submit(self, request_id, hashes, num_computed_tokens=0, max_tokens=None, wait_ms=None):
        self.calls.append(("submit", request_id, num_computed_tokens, max_tokens))
        self.lookups.setdefault(request_id, list(hashes))

    def _payload(self, group, hashes, index):
        step = self.groups[group][1] // self.hash_tokens
        return (group, hashes[(index + 1) * step - 1])

    def _boundary(self, hashes):
        tokens = 0
        for end in range(1, len(hashes) + 1):
            for group, (_, block, _, _) in enumerate(self.groups):
                if block and end * self.hash_tokens % block == 0:
                    index = end * self.hash_tokens // block - 1
                    if self._payload(group, hashes, index) not in self.host:
                        return tokens
            tokens = end * self.hash_tokens
        return tokens

    def poll(self, request_id, hashes, num_computed_tokens, max_tokens=None, wait_ms=None):
        self.calls.append(("poll", request_id, num_computed_tokens))
        if request_id in self.failed:
            return 0
        self.lookups[request_id] = list(hashes)
        boundary = max(0, min(self._boundary(hashes) - self.dropped, max_tokens or 1 << 30))
        boundary = boundary // self.alignment * self.alignment
        owed = [
            self._payload(group, hashes, index)
            for group, (_, block, _, _) in enumerate(self.groups)
            if block
            for index in range(num_computed_tokens // block, boundary // block)
        ]
        return None if self.disk.intersection(owed) else boundary

    def tiers(self, request_id, num_computed_tokens, num_external_tokens):
        hashes = self.lookups[request_id]
        first, last = num_computed_tokens // self.hash_tokens, (num_computed_tokens + num_external_tokens)
        promoted = sum((0, hashes[index]) in self.promoted for index in range(first, last // self.hash_tokens))
        return num_external_tokens - promoted * self.hash_tokens, promoted * self.hash_tokens

    def begin_load(self, request_id, num_computed_tokens, num_external_tokens):
        self.calls.append(("begin_load", request_id, num_computed_tokens, num_external_tokens))
        if request_id in self.gone:
            return None
        hashes = self.lookups[request_id]
        plan = []
        for group, (_, block, _, _) in enumerate(self.groups):
            if not block:
                continue
            first, last = num_computed_tokens // block, (num_computed_tokens + num_external_tokens) // block
            offsets = [self.host[self._payload(group, hashes, index)] for index in range(first, last)]
            plan.append((group, first, struct.pack(f"<{len(offsets)}q", *offsets)))
        job = next(self.jobs)
        self.loads[job] = request_id
        return job, 0, plan

    def end_load(self, job_id, ok):
        self.calls.append(("end_load", job_id, ok))
        request_id = self.loads.pop(job_id)
        if not ok:
            self.failed.add(request_id)

    def shared_tokens(self, request_id):
        return self._boundary(self.lookups.get(request_id, []))

    def begin_save(self, request_id, hashes, num_tokens, offers=()):
        self.calls.append(("begin_save", request_id, num_tokens))
        refused = False
        job, plan, taken = next(self.jobs), [], []
        for group, (_, block, _, _) in enumerate(self.groups):
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
            plan.append((group, 0, struct.pack(f"<{len(offsets)}q", *offsets)))
        if taken:
            self.saves[job] = taken
        self.granted.append((job, job if taken else 0, 0, plan if taken else [], refused))
        return job

    def grants(self):
        if self.is_slow:
            return []
        granted, self.granted = self.granted, []
        return granted

    def end_save(self, job_id, ok):
        self.calls.append(("end_save", job_id, ok))
        for payload, slot in self.saves.pop(job_id):
            del self.reserved[payload]
            if ok:
                self.host[payload] = slot
                self.engine.counters["saved_blocks"] += 1

    def discard(self, request_id):
        self.calls.append(("discard", request_id))
        self.lookups.pop(request_id, None)

    def finish(self, request_id):
        self.calls.append(("finish", request_id))
        self.lookups.pop(request_id, None)

    def reset(self, timeout_s=10.0):
        self.host.clear()
        self.disk.clear()
        return True

    def close(self):
        self.closed = True
