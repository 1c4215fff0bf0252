"""Single flight: two requests do not load the same blocks onto the device.

Requests with one prefix share device blocks once vLLM has cached their hashes. vLLM caches the hashes of a load when
the load has ended. A request that hits in a tier before this end would get device blocks and a copy of its own. So a
request waits while another request loads its next missing block, and then hits on the device.
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
        """Begin without loads.

        ``any_part``: whether a device hit may end at any loaded block. With windows and states a device hit ends only
        where a load ends, or at any block of a load of at most ``whole_blocks`` blocks.
        """
        self.any_part = any_part
        self._whole_blocks = whole_blocks
        self._loads: dict[str, _Load] = {}
        self._filled_by: dict[bytes, str] = {}
        """By block hash: the request whose load fills the block, the latest of several."""

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

        ``hashes``: the chain of the request that may wait.
        """
        if begin >= end or (loader := self._filled_by.get(hashes[begin])) in (None, request_id):
            return False
        load = self._loads[loader]
        if self.any_part or load.end - load.begin <= self._whole_blocks:
            return True
        return load.end <= end and hashes[load.end - 1] == load.hashes[load.end - 1]
