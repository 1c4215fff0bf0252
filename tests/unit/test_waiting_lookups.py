"""Requests that wait for reads: vLLM asks about each one in each step, and the core is asked once for all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft.connector.scheduler import lookups, waiting_lookups

LATER = (None, False)


class Waiting:
    """A connector some of whose requests wait for reads, each for 4 blocks."""

    def __init__(self, count=3):
        self.world = World()
        self.session = self.world.session
        self.connector = self.world.connector
        self.requests = []
        for index in range(count):
            prefix = tokens(4 * BLOCK, seed=index + 1)
            self.world.prefill(Request(f"saved {index}", prefix))
            self.requests.append(Request(f"waits {index}", [*prefix, 1]))
        self.session.lower()
        self.ask()
        self.session.calls.clear()
        self.looks = 0
        ended_waits = self.session.ended_waits

        def counted():
            self.looks += 1
            return ended_waits()

        self.session.ended_waits = counted

    def question(self, request, computed=0):
        """A question of vLLM, as `UndercroftConnector` passes it on."""
        if self.connector.lookups.waiting.contains(request, computed):
            return LATER
        return self.connector.get_num_new_matched_tokens(request, computed)

    def ask(self, computed=0):
        return [self.question(request, computed) for request in self.requests]

    def lookups(self):
        """The names of the requests that were looked up since the last call."""
        names = [name for kind, name, *_ in self.session.calls if kind == "lookup"]
        self.session.calls.clear()
        return names

    def promote(self, index):
        """The disk has delivered the blocks of one request."""
        self.session.disk -= {(0, block_hash) for block_hash in self.requests[index].block_hashes}


def test_the_core_is_asked_once_a_step_for_all_requests_that_wait():
    waiting = Waiting()
    for step in range(1, 4):
        waiting.world.step()
        assert waiting.ask() == [LATER] * 3
        assert (waiting.looks, waiting.lookups()) == (step, [])


def test_only_the_request_whose_wait_has_ended_is_looked_up():
    waiting = Waiting()
    waiting.world.step()
    waiting.promote(1)
    assert waiting.ask() == [LATER, (4 * BLOCK, True), LATER]
    assert waiting.lookups() == ["waits 1"]
    waiting.world.admit(waiting.requests[1], external=4 * BLOCK)
    assert waiting.world.step().loads
    del waiting.requests[1]
    assert waiting.ask() == [LATER] * 2
    assert waiting.lookups() == []


def test_a_question_within_the_same_step_learns_of_the_end_too():
    waiting = Waiting()
    waiting.promote(0)
    assert waiting.ask() == [(4 * BLOCK, True), LATER, LATER]
    waiting.promote(1)
    assert waiting.ask()[1] == (4 * BLOCK, True)


def test_steps_in_which_not_all_requests_are_asked_about_leave_no_old_answer():
    """vLLM stops asking when a step has all its tokens."""
    waiting = Waiting()
    waiting.world.step()
    first, *_, last = waiting.requests
    assert waiting.question(first, 0) == LATER
    waiting.world.step()
    waiting.promote(2)
    assert waiting.question(last, 0) == (4 * BLOCK, True)


def test_a_question_from_other_tokens_is_a_lookup():
    """Another request has computed the first block meanwhile."""
    waiting = Waiting()
    waiting.world.step()
    assert waiting.ask(BLOCK) == [LATER] * 3
    assert waiting.lookups() == [request.request_id for request in waiting.requests]
    waiting.world.step()
    assert waiting.ask(BLOCK) == [LATER] * 3
    assert waiting.lookups() == []


@pytest.mark.parametrize("way", ["finished", "replaced", "computed"])
def test_a_request_that_does_not_wait_any_more_gets_an_answer_of_its_own(way):
    waiting = Waiting(1)
    [request] = waiting.requests
    if way == "finished":
        waiting.world.finish(request)
    elif way == "computed":
        waiting.world.admit(request)
    waiting.world.step()
    other = request if way == "computed" else Request(request.request_id, [*tokens(BLOCK, seed=9), 1])
    waiting.session.promote()
    waiting.session.waits.clear()
    expected = (4 * BLOCK, True) if way == "computed" else (0, False)
    assert waiting.question(other, 0) == expected


def test_a_wait_is_weighed_against_the_steps_so_far():
    waiting = Waiting()
    running = Request("runs", tokens(2 * BLOCK, seed=8))
    waiting.world.prefill(running)
    told = []
    ended_waits = waiting.session.ended_waits

    def note():
        told.append(len(waiting.session.steps))
        return ended_waits()

    waiting.session.ended_waits = note
    waiting.world.step()
    # All steps so far have ended.
    for _ in range(8):
        waiting.connector.steps.ended()
    waiting.session.steps.clear()
    waiting.connector.steps.scheduled({"runs": 1})
    waiting.connector.steps.ended()
    assert waiting.ask() == [LATER] * 3
    assert told == [1]


def test_a_request_that_has_waited_for_too_long_gives_up_and_others_wait_on(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (lookups, waiting_lookups):
        monkeypatch.setattr(module, "time", clock)
    waiting = Waiting(1)
    prefix = tokens(4 * BLOCK, seed=9)
    waiting.world.prefill(Request("saved", prefix))
    waiting.session.lower()
    now[0] = lookups.LOOKUP_DEADLINE_S / 2
    waiting.requests.append(Request("later", [*prefix, 1]))
    assert waiting.ask() == [LATER] * 2
    now[0] = lookups.LOOKUP_DEADLINE_S
    waiting.world.step()
    assert waiting.ask() == [(0, False), LATER]
    now[0] *= 1.5
    waiting.world.step()
    assert waiting.ask() == [(0, False)] * 2
