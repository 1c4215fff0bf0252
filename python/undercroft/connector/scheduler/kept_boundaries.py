"""The boundaries whose windows a save copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undercroft.connector.groups import Groups
    from undercroft.connector.scheduler.request_state import RequestState


def kept_boundaries(
    state: RequestState, groups: Groups, end: int, state_interval_tokens: int, *, finished: bool
) -> set[int]:
    """Boundaries up to ``end`` tokens where a later hit may end and whose windows have not been saved before."""
    if not groups.has_windows:
        return set()
    request, align = state.request, groups.align
    begin = state.saving.windows_kept
    # A hit of an equal prompt ends before its last token. A hit of a longer prompt may end after it.
    ends = {align(request.num_prompt_tokens - 1), align(request.num_prompt_tokens)}
    ends |= {
        state.saving.shared_boundary,
        align(getattr(request, "shared_prefix_boundary", 0)),
        align(state.num_computed_tokens),
    }
    if finished:
        ends.add(align(end))
    if interval := align(state_interval_tokens + groups.alignment - 1):
        ends.update(range((begin // interval + 1) * interval, end + 1, interval))
    if dropped := groups.dropped_tokens:
        # With a draft, a hit ends `dropped` tokens before its cached prefix does.
        ends |= {boundary - dropped for boundary in ends}
    kept = {boundary for boundary in ends if begin < boundary <= end}
    return kept | {align(end)} if finished and align(end) else kept
