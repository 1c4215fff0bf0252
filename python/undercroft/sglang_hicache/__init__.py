"""undercroft as the third level of SGLang's HiCache: ``--hicache-storage-backend dynamic`` with the class
`UndercroftHiCache` of this module (docs/sglang.md).

SGLang keeps pages on the device and in host memory. This back end keeps them on disk, on a server or in a remote store,
below SGLang's host memory, and copies from and into SGLang's own pools.
"""

from __future__ import annotations

from undercroft.sglang_hicache.backend import UndercroftHiCache

__all__ = ["UndercroftHiCache"]
