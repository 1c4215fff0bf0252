"""Spans of promotions, loads and saves, in the trace of their request."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft import compat
from undercroft.connector.requests.spans import LOAD, PROMOTION, SAVE, Spans

PREFIX = tokens(4 * BLOCK)


class Traced:
    """A scheduler's half whose requests have trace headers, wired as the connector does it; and the spans so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> None:
        self.made: list[tuple[str, Any, dict[str, Any]]] = []
        monkeypatch.setattr(compat, "trace", self._trace)
        self.world = World(ranks=ranks)
        self.spans = Spans(ranks)

    def _trace(self, name: str, since: float, headers: Any, attributes: dict[str, Any]) -> None:
        assert 0 <= time.time() - since < 60
        self.made.append((name, headers, attributes))

    def request(self, name: str, ids: list[int], headers: Any = None) -> Any:
        request = Request(name, ids)
        request.trace_headers = headers
        self.spans.arrived(request)  # type: ignore[arg-type]
        self.world.connector.on_new_request(request)
        return request

    def ask(self, request: Any) -> Any:
        answer = self.world.connector.get_num_new_matched_tokens(request, 0)
        self.spans.asked(request.request_id, is_reading=self.world.connector.is_reading(request))
        return answer

    def step(self, *scheduled: Any) -> Any:
        meta = self.world.step(scheduled)
        self.spans.scheduled(meta)
        return meta

    def answer(self, meta: Any, ranks: int = 1, **failed: Any) -> None:
        from fake_vllm import worker_output

        self.spans.reported(worker_output(meta, ranks, **failed))

    def finish(self, request: Any) -> None:
        self.world.finish(request)
        self.spans.finished(request.request_id)

    def left(self) -> list[Any]:
        return [one for one in vars(self.spans).values() if isinstance(one, dict | list) and one]


def test_a_save_and_a_load_have_spans_with_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    first = traced.request("a", PREFIX, "trace a")
    assert traced.ask(first) == (0, False)
    traced.world.admit(first)
    meta = traced.step((first, len(PREFIX)))
    assert traced.made == []
    traced.finish(first)
    traced.world.answer(meta)
    traced.step()
    traced.answer(meta)
    assert traced.made == [(SAVE, "trace a", {f"{SAVE}.blocks": 4, f"{SAVE}.ok": True})]
    for number, failed in enumerate([(), ["b1"]]):
        traced.made.clear()
        second = traced.request(f"b{number}", [*PREFIX, 1], "trace b")
        assert traced.ask(second) == (4 * BLOCK, True)
        traced.world.admit(second, external=4 * BLOCK)
        meta = traced.step()
        assert traced.made == []
        traced.answer(meta, failed_loads=failed)
        traced.world.answer(meta)
        assert traced.made == [(LOAD, "trace b", {f"{LOAD}.blocks": 4, f"{LOAD}.ok": not failed})]
        traced.finish(second)
    traced.step()
    assert traced.left() == []


def test_a_save_ends_with_the_last_rank_and_fails_with_any(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, ranks=2)
    request = traced.request("a", PREFIX, "trace")
    traced.ask(request)
    traced.world.admit(request)
    meta = traced.step((request, len(PREFIX)))
    traced.answer(meta)
    assert traced.made == []
    traced.answer(meta, failed_saves=[meta.saves[0].transfer_id])
    assert traced.made == [(SAVE, "trace", {f"{SAVE}.blocks": 4, f"{SAVE}.ok": False})]


def test_the_wait_for_the_disk_has_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    traced.world.prefill(Request("saved", PREFIX))
    traced.world.session.lower()
    request = traced.request("b", [*PREFIX, 1], "trace")
    assert traced.ask(request) == traced.ask(request) == (None, False)
    assert traced.made == []
    traced.world.session.promote()
    assert traced.ask(request) == traced.ask(request) == (4 * BLOCK, True)
    assert traced.made == [(PROMOTION, "trace", {})]
    # Aborted while it waits.
    traced.world.session.lower()
    gone = traced.request("c", [*PREFIX, 2], "trace")
    traced.spans.asked("c", is_reading=True)
    traced.finish(gone)
    traced.finish(request)
    traced.step()
    assert traced.left() == []


def test_a_request_without_trace_headers_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch)
    traced.world.prefill(Request("saved", PREFIX))
    traced.world.session.lower()
    request = traced.request("b", [*PREFIX, *tokens(BLOCK, 9)])
    traced.ask(request)
    traced.world.session.promote()
    traced.ask(request)
    traced.world.admit(request, external=4 * BLOCK)
    meta = traced.step()
    traced.answer(meta)
    traced.spans.reported(SimpleNamespace(finished_recving=None, failed_recving=set(), kv_connector_worker_meta=None))
    traced.finish(request)
    assert traced.made == [] and traced.left() == []
