"""Texts for the reasons why tokens of a prompt were not loaded, as the engine and the connector report them."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "complete": "everything that could be loaded was cached",
    "never_seen": "the next block was never saved, or its eviction is too long ago to be remembered",
    "not_admitted": "the next block was not saved: all that host memory held was worth more, and there is no disk",
    "evicted_host": "the next block was evicted from host memory and was not on disk",
    "evicted_disk": "the next block was evicted from disk",
    "lost": "the next block was lost: unreadable, changed, reset, cleared, or after one that is gone",
    "incomplete": "the next block was being saved, or was saved without one before it",
    "other_identity": "the next block is cached under another identity (undercroft explain --request ID)",
    "no_boundary": "a sliding window or a state that a hit needs there is not cached",
    "too_few": "a hit would gain too few tokens (min_load_tokens)",
    "planned": "by prediction, computing took less time than loading (docs/planning.md)",
    "remote_planned": "computing took less time than fetching from the remote store (docs/planning.md)",
    "timed_out": "the wait for the disk was over (promotion_wait, lookup_timeout_ms)",
    "disk_silent": "the disk did not answer",
    "budget": "reads from disk for other requests took all of promotion_memory, or hits and loads of this vLLM "
    "keep its whole share of a server's host memory",
    "repeated": "the blocks were read from disk three times and evicted before the load",
    "threshold": "no hit reaches the request's cache_hit_threshold",
    "load_failed": "a load for this request failed before",
    "draining": "the engine drained before maintenance, and read nothing from disk (undercroft drain)",
    "no_server": "the server did not answer in time, or is not connected",
}
"""Name of a reason -> its meaning. The names are those of `undercroft_contract::explain::Reason`."""

MISSES = tuple(name for name in REASONS if name not in ("complete", "no_server"))
"""Reasons of lookups that found nothing: the values of the label of the metric ``misses``."""

PROMPT_END, NOT_LOOKED_UP, OTHER_CONNECTOR, NOT_TAKEN = "prompt_end", "not_looked_up", "other_connector", "not_taken"
BESIDE_LOOKUPS: dict[str, str] = {
    PROMPT_END: "after the last boundary at which a hit could end: vLLM always computes the last tokens",
    NOT_LOOKED_UP: "the request may not use the cache, or not from here on: it asks for log probabilities of its "
    "prompt, or its block hashes do not tell its inputs apart (docs/identity.md)",
    OTHER_CONNECTOR: "another connector of a MultiConnector has brought them",
    NOT_TAKEN: "they were found, and vLLM took a shorter hit",
}
"""Reasons why tokens of a prompt were not loaded that no lookup gives."""
REASONS_OF_TOKENS = REASONS | BESIDE_LOOKUPS
MISSED = tuple(name for name in REASONS_OF_TOKENS if name != "complete")
"""The values of the label of the metric ``missed_tokens``."""

_WITH_AGE = ("not_admitted", "evicted_host", "evicted_disk", "lost")


def sentence(reason: str, ago_s: float | None = None) -> str:
    """The text for a reason. ``ago_s``: seconds since the missing block was lost, if they are known."""
    text = REASONS.get(reason, reason)
    if ago_s is None or reason not in _WITH_AGE:
        return text
    return f"{text} ({ago_s:.0f} s before)"
