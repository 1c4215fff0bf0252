"""Completes the prefixes that SGLang passes with a prefetch.

SGLang 0.5.23 prefetches what comes after a node of its radix tree, and passes the pages of the node's ancestors as the
prefix, without those of the node. Its interface promises a chain without gaps (``HiCacheStorageExtraInfo``), and pages
below a gap are not found.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from undercroft.log import LogOnce

_MODULE, _CLASS = "sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache"
_METHOD = "get_prefix_hash_values"
"""Only prefetches call it: saves take the ancestors' pages from the tree's core, and pass those of the node as keys."""
_log_once = LogOnce()


def complete() -> str | None:
    """Let SGLang pass the node's own pages, too. Returns the reason, for people, if this cannot be done."""
    try:
        tree = getattr(importlib.import_module(_MODULE), _CLASS)
        ancestors = getattr(tree, _METHOD)
    except (ImportError, AttributeError) as error:
        return str(error)
    if hasattr(ancestors, "is_undercroft"):
        return None

    @functools.wraps(ancestors)
    def and_own(self: Any, node_id: Any) -> list[str]:
        found: list[str] = ancestors(self, node_id)
        try:
            own: list[str] = self.tree_core.get_hash_values(node_id)
            return found if found[-1:] == own[-1:] else [*found, *own]
        except Exception as error:
            message = (
                "undercroft: SGLang's radix tree does not say which pages a node has, so prefixes stay incomplete, and "
                "pages below them are not found: %s"
            )
            _log_once(logging.ERROR, type(error), message, error, error=error)
            return found

    and_own.is_undercroft = True  # type: ignore[attr-defined]
    setattr(tree, _METHOD, and_own)
    return None
