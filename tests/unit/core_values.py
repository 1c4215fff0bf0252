"""Values that tests give the core and take from it."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from undercroft import _core

PATIENCE_S = 60.0


class Group(NamedTuple):
    """A KV cache group, as `_core.Engine.register` takes it."""

    kind: str
    block_tokens: int
    payload_bytes: int
    window_tokens: int = 0


def granted(session: _core.Session, asked: _core.SaveGrant) -> _core.SaveGrant:
    """The grant of a save; one that is pending is waited for."""
    end = time.monotonic() + PATIENCE_S
    while asked.pending:
        assert time.monotonic() < end, "no grant comes"
        asked = next((grant for grant in session.poll_saves() if grant.transfer_id == asked.transfer_id), asked)
        time.sleep(0.001)
    return asked


def places(extents: Sequence[_core.Extent], hashes: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Where in the arena which blocks of one group lie; without those that are not to be copied."""
    found = []
    for extent in extents:
        slots = struct.unpack(f"<{len(extent.offsets) // 8}q", extent.offsets)
        found += [(slot, hashes[index]) for index, slot in enumerate(slots, extent.first_block) if slot >= 0]
    return found
