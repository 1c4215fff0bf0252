"""The patches for undercroft as a child of MultiConnector, whose other children have their own loads and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from undercroft.vllm_patches.checks import sets, takes
from undercroft.vllm_patches.table import MULTI_CONNECTOR_HITS, MULTI_CONNECTOR_POLICY, failed, guarded, replace

_JUDGE = "_undercroft_judge"

Answer = tuple[int | None, bool]
"""The number of tokens that a connector can load (None: not known yet), and whether it loads asynchronously."""


@guarded(MULTI_CONNECTOR_POLICY)
def recompute_own_failed_loads(ours_in: Callable[[Any], Iterable[Any]]) -> None:
    """Let schedulers recompute blocks that undercroft failed to load. The configured policy applies to failed loads of
    other connectors.

    ``ours_in`` finds undercroft's connectors in the scheduler's connector. Each returns which failed loads are its own.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    sets(Scheduler, "connector", "recompute_kv_load_failures")
    takes(Scheduler, "_handle_failed_recving", "failed_req_ids")

    def wrap(original: Callable[[Any, set[str]], set[str]]) -> Callable[[Any, set[str]], set[str]]:
        def handle_failed_recving(self: Any, failed_req_ids: set[str]) -> set[str]:
            own: set[str] = set()
            try:
                if not self.recompute_kv_load_failures:
                    own = own.union(*(one.own_loads(failed_req_ids) for one in ours_in(self.connector)))
            except Exception as error:  # The configured policy then applies to all failed loads.
                failed(MULTI_CONNECTOR_POLICY, error)
            if not own:
                return original(self, failed_req_ids)
            self.recompute_kv_load_failures = True
            try:
                original(self, own)
            finally:
                self.recompute_kv_load_failures = False
            return original(self, set(failed_req_ids) - own)

        return handle_failed_recving

    replace((Scheduler, "_handle_failed_recving", wrap))


@guarded(MULTI_CONNECTOR_HITS)
def judge_all_hits(ours_in: Callable[[Any], Iterable[Any]]) -> None:
    """Let undercroft's hit threshold judge MultiConnector's answer, not the answer of undercroft alone.

    ``ours_in`` finds undercroft's connectors in a MultiConnector. The first of them judges.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    takes(MultiConnector, "get_num_new_matched_tokens", "request", "num_computed_tokens")

    def wrap(original: Callable[..., Answer]) -> Callable[..., Answer]:
        def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Answer:
            try:
                judge = self.__dict__[_JUDGE]
            except KeyError:
                judge = self.__dict__[_JUDGE] = _find_judge(self, ours_in)
            answer = original(self, request, num_computed_tokens)
            return answer if judge is None or answer[0] is None else judge(request, num_computed_tokens, answer)

        return get_num_new_matched_tokens

    replace((MultiConnector, "get_num_new_matched_tokens", wrap))


def _find_judge(connector: Any, ours_in: Callable[[Any], Iterable[Any]]) -> Callable[[Any, int, Answer], Answer] | None:
    """``judge`` of the first connector of undercroft, unless an outer MultiConnector uses it already."""
    try:
        judges = [one.judge for one in ours_in(connector) if one.enter_multi_connector()]
    except Exception as error:  # Each child then judges its own answer.
        failed(MULTI_CONNECTOR_HITS, error)
        return None
    return judges[0] if judges else None
