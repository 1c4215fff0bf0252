"""Single flight of loads onto the device.

vLLM shares the device blocks of requests with one prefix once their hashes are cached, and caches the hashes of a load
when the load has ended. A request that hits in a tier before that gets device blocks, and a copy, of its own. So a
request whose next missing block is being loaded by another request waits for that load, and hits on the device then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class _Load:
    begin: int
    end: int
    hashes: Sequence[bytes]
    """The hashes of the whole blocks up to the load's end."""


class SingleFlight:
    """The loads in progress, by the blocks that they fill."""

    def __init__(self, *, any_part: bool, whole_blocks: int = 0) -> None:
        """Know of no load yet.

        ``any_part``: whether each loaded block is a hit of the device by itself. Without it (windows, states) a device
        hit ends only where a load ends, or at any block of a load of at most ``whole_blocks``.
        """
        self.any_part = any_part
        self._whole_blocks = whole_blocks
        self._loads: dict[str, _Load] = {}
        self._filled_by: dict[bytes, str] = {}
        """The request whose load fills the block with that hash: the latest, where there are two."""

    def begin(self, request_id: str, hashes: Sequence[bytes], begin: int, end: int) -> None:
        """A request's load fills the blocks ``[begin, end)`` of the chain ``hashes``."""
        load = _Load(begin, end, list(hashes[:end]))
        self._loads[request_id] = load
        for block_hash in load.hashes[begin:]:
            self._filled_by[block_hash] = request_id

    def end(self, request_id: str) -> None:
        """The request's load has ended, or its blocks will not be used. Idempotent."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        for block_hash in load.hashes[load.begin :]:
            if self._filled_by.get(block_hash) == request_id:
                del self._filled_by[block_hash]

    def fills(self, request_id: str, hashes: Sequence[bytes], begin: int, end: int) -> bool:
        """Whether another request's load brings block ``begin`` to the device, for a hit that ends before ``end``.

        ``hashes``: the chain of the request that asks.
        """
        if begin >= end or (loader := self._filled_by.get(hashes[begin])) in (None, request_id):
            return False
        load = self._loads[loader]
        if self.any_part or load.end - load.begin <= self._whole_blocks:
            return True
        return load.end <= end and hashes[load.end - 1] == load.hashes[load.end - 1]
