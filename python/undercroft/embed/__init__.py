"""Undercroft in a program of your own: a cache of chains of blocks below the program's memory (docs/embed.md).

A *chain* is a list of hashes, one for each ``block_tokens`` tokens, and each hash stands for everything before its end
too (`chain`). A *block* is the bytes of one group for a piece of the chain. They lie where the program says, in memory
that it has named (`Cache.add_region`), and are copied from and to there on threads of the cache.

No call waits for a disk, except those with a ``timeout_s``. No failure of a disk or a server raises: it is a miss.
"""

from __future__ import annotations

from undercroft.embed.blocks import Blocks, Group, Job, chain
from undercroft.embed.cache import EMBED_DEFAULTS, EMBED_OPTIONS, Cache

__all__ = ["EMBED_DEFAULTS", "EMBED_OPTIONS", "Blocks", "Cache", "Group", "Job", "chain"]
