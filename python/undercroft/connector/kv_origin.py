"""Which weights have computed the KV that the device holds, as far as vLLM's calls show it."""

from __future__ import annotations


class KvOrigin:
    """The origin of the KV on the device since vLLM last reset its prefix cache."""

    def __init__(self) -> None:
        self.is_private = False
        """Whether this vLLM shares its blocks with no other. A private namespace may hold blocks of several weights."""
        self.has_kv = False
        """Whether the device may hold any KV. A step that computes tokens sets it."""
        self.is_mixed = False
        """Whether the device may hold KV of other weights than the present ones."""

    def loads(self) -> None:
        """A load begins."""
        self.has_kv = True
        self.is_mixed |= self.is_private

    def weights_change(self) -> None:
        """The weights may change now."""
        self.is_mixed |= self.has_kv

    def is_reset(self) -> None:
        """The device holds no KV."""
        self.has_kv = self.is_mixed = False
