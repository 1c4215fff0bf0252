"""Models whose hits never come from the remote store, or only in part."""

from __future__ import annotations

import math
from collections.abc import Sequence

from undercroft.connector.groups import GroupRegistration

RUN_MAX = 64
"""Most hash blocks of a segment (`rust/engine/src/remote/spaces.rs`)."""


def why_limited(groups: Sequence[GroupRegistration], hash_block_tokens: int, dropped_tokens: int) -> str | None:
    """The hits of a model that never come from a remote store, for people; None if every hit may."""
    used = [group for group in groups if group.kind != "ignored"]
    if all(group.kind != "full" for group in used):
        return "the remote store is not used: the model has no full attention, whose blocks every hit needs"
    run = math.lcm(*(group.block_tokens for group in used)) // hash_block_tokens
    if run > RUN_MAX:
        return f"the remote store is not used: blocks of all KV cache groups end together after {run} blocks only"
    if dropped_tokens and any(group.kind != "full" for group in used):
        return "nothing is read from the remote store: the model has a draft model beside windows or states"
    return None
