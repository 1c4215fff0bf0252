"""The changes of the disk and the remote store as vLLM's offloading takes them from its tiers, to tell routers.

vLLM's own host memory stands between the device and undercroft's, and vLLM announces it. So undercroft's memory,
through which chunks only pass, has no events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from undercroft.vllm_tier.chunks import GROUP_BYTES

if TYPE_CHECKING:
    from undercroft._core import Session
    from undercroft.vllm_tier.chunks import Chunks

_LOCALITIES = {"disk": Locality.LOCAL, "remote": Locality.REMOTE}
_Announced = tuple[OffloadKey, Locality]


class TierEvents:
    """The events of one tier."""

    def __init__(self, session: Session, chunks: Chunks) -> None:
        self._session = session
        self._groups = {
            number: group.group.to_bytes(GROUP_BYTES, "big")
            for number, group in enumerate(chunks.engine_groups)
            # Where the engine's block holds several chunks, only the last one's hash is known.
            if group.index == group.per_block - 1
        }
        """By the engine's group, the end of its keys."""
        self._announced: set[_Announced] = set()
        self.more = True
        """Whether the engine has more events, so that vLLM must go on stepping."""
        self._restart = False

    def forgotten(self) -> None:
        """vLLM has published that all blocks are cleared. Routers then drop this tier's too: report all again."""
        self._restart = self.more = True
        self._announced.clear()

    def take(self) -> list[OffloadingEvent]:
        """The events since the last call."""
        # Even if a call below fails each time, vLLM must not go on stepping for events.
        self.more = False
        restart, self._restart = self._restart, False
        taken = self._session.take_events(restart)
        if taken is None:
            return []
        cleared, changes, self.more = taken
        events: list[OffloadingEvent] = []
        if cleared:
            void, self._announced = self._announced, set()
            events += self._events(void, removed=True)
        run: list[_Announced] = []
        removed = False
        for stored, tier, group, block_hash, _ in changes:
            locality, end = _LOCALITIES.get(tier), self._groups.get(group)
            if locality is None or end is None:
                continue
            one = OffloadKey(block_hash + end), locality
            if (one in self._announced) == stored:
                continue
            if run and removed == stored:
                events += self._events(run, removed=removed)
                run = []
            (self._announced.add if stored else self._announced.remove)(one)
            removed = not stored
            run.append(one)
        return events + self._events(run, removed=removed)

    @staticmethod
    def _events(announced: Iterable[_Announced], *, removed: bool) -> list[OffloadingEvent]:
        keys: dict[Locality, list[OffloadKey]] = {}
        for key, locality in announced:
            keys.setdefault(locality, []).append(key)
        return [
            OffloadingEvent(each, Medium.STORAGE, removed, locality=locality, removal_expected=True)
            for locality, each in keys.items()
        ]
