"""The loads that workers carry out. A reset may overtake them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undercroft import vllm_patches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from undercroft._core import Session
    from undercroft.connector.observe.stats import Counts
    from undercroft.connector.scheduler.loads import LoadPlan
    from undercroft.connector.scheduler.prompt_tokens import PromptTokens
    from undercroft.connector.scheduler.request_state import RequestState


class RunningLoads:
    """The requests whose loads the workers have not reported yet."""

    def __init__(
        self,
        session: Session,
        requests: Mapping[str, RequestState],
        counts: Counts,
        prompt_tokens: PromptTokens,
        report: Callable[[str, Exception], None],
    ) -> None:
        """``requests``: all requests that the scheduler's half knows."""
        self._session = session
        self._requests = requests
        self._counts = counts
        self._prompt_tokens = prompt_tokens
        self._report = report
        self._plans: dict[str, LoadPlan | None] = {}
        self._given_up: set[str] = set()
        """Requests whose load a reset has overtaken: when it ends, the request is looked up again."""

    def __len__(self) -> int:
        return len(self._plans)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._plans

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def begin(self, request_id: str, plan: LoadPlan | None) -> None:
        """vLLM waits for the load of a request. ``plan``: None if the load has failed before it began."""
        self._plans[request_id] = plan

    def plan(self, request_id: str) -> LoadPlan | None:
        """The load of a request; None if there is none."""
        return self._plans.get(request_id)

    def give_up(self) -> None:
        """A reset: the requests are looked up again when the workers have ended the loads."""
        for request_id in self._plans:
            # A request without a state has ended: vLLM frees its blocks at the end of the load.
            state = self._requests.get(request_id)
            if state is None or vllm_patches.recompute_load(state.request):
                self._given_up.add(request_id)

    def ended(self, request_id: str, *, ok: bool) -> None:
        """The workers have ended the load of a request."""
        plan = self._plans.pop(request_id)
        given_up = request_id in self._given_up
        self._given_up.discard(request_id)
        if not ok:
            self._counts.add("failed_loads")
        if (state := self._requests.get(request_id)) is not None:
            state.load_ended(ok=ok, given_up=given_up)
        if plan is None:
            return
        if ok and not given_up:
            self._prompt_tokens.loaded(request_id, plan)
        for transfer_id in plan.transfers:
            end_transfer(self._session, self._report, transfer_id, ok, "reset" if given_up else None)


def end_transfer(
    session: Session, report: Callable[[str, Exception], None], transfer_id: int, ok: bool, given_up: str | None
) -> None:
    """Tell the engine that a load or a save has ended. Raises nothing: other transfers must end, too.

    ``ok``: whether all ranks have copied. ``given_up``: why nobody wants the copies any more, if so.
    """
    try:
        if ok and given_up is not None:
            session.give_up(transfer_id, given_up)
        else:
            session.end_transfer(transfer_id, ok)
    except Exception as error:
        report("update_connector_output", error)
