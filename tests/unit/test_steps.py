"""Reports of vLLM's steps to the planner."""

from types import SimpleNamespace

import pytest

from undercroft.connector.scheduler import steps as module
from undercroft.connector.scheduler.request_state import RequestState
from undercroft.connector.scheduler.steps import Steps


class Told:
    def __init__(self):
        self.steps = []

    def report_steps(self, steps):
        self.steps += steps


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def steps(told, clock):
    return Steps(told)


def arrive(steps, name, tokens):
    state = RequestState(SimpleNamespace(request_id=name, num_tokens=tokens, num_computed_tokens=0), None)
    steps.arrived(state)
    return state


def test_a_step_is_reported_with_its_tokens_positions_and_decodes(steps, told, clock):
    state = arrive(steps, "a", 1000)
    state.request.num_computed_tokens = 512
    steps.scheduled({"a": 400, "old": 1, "older": 1})
    clock.now += 0.25
    steps.ended()
    assert told.steps == [(400, 400 * 512 + 400 * 200, 2, 0.25)]


def test_a_step_that_was_scheduled_ahead_begins_when_the_one_before_ends(steps, told, clock):
    arrive(steps, "a", 100)
    arrive(steps, "b", 100)
    steps.scheduled({"a": 100})
    clock.now += 0.01
    steps.scheduled({"b": 100})
    clock.now += 0.09
    steps.ended()
    clock.now += 0.2
    steps.ended()
    assert [round(step[3], 3) for step in told.steps] == [0.1, 0.2]


def test_steps_without_a_prefill_are_reported_together_and_idle_ones_not_at_all(steps, told, clock):
    for count in range(17):
        steps.scheduled({"a": 1} if count else {})
        clock.now += 0.01
        steps.ended()
        assert len(told.steps) == (16 if count == 16 else 0)


def test_a_lookup_reports_the_steps_so_far_and_that_nothing_runs_any_more(steps, told, clock):
    asking, running = arrive(steps, "asking", 100), arrive(steps, "running", 1)
    steps.computed(running, 1)
    for _ in range(2):
        steps.scheduled({"running": 1})
        clock.now += 0.25
        steps.ended()
    assert told.steps == []
    steps.queued(asking)
    assert told.steps == [(0, 0, 1, 0.25)] * 2
    steps.queued(asking)
    assert len(told.steps) == 2
    steps.gone(running)
    steps.queued(asking)
    steps.queued(asking)
    assert told.steps[2:] == [(0, 0, 0, 0.0)]


def test_tokens_that_wait_are_those_of_requests_that_came_before(steps):
    first, second, third = (arrive(steps, name, 1000) for name in "abc")
    assert [steps.queued(state) for state in (first, second, third)] == [0, 1000, 2000]
    # Computed in part, loaded, gone: each counts once.
    steps.scheduled({"a": 600})
    assert steps.queued(third) == 1400
    steps.computed(second, 900)
    assert steps.queued(third) == 500
    steps.gone(first)
    steps.gone(second)
    assert steps.queued(third) == 0
    steps.gone(second)
    assert steps.queued(arrive(steps, "d", 10)) == 1000


def test_steps_without_reported_ends_use_no_more_memory(steps, told, clock):
    for _ in range(100):
        steps.scheduled({"a": 1})
    clock.now += 1
    for _ in range(100):
        steps.ended()
    assert len(told.steps) < 16
