"""A request that finishes tells the engine how its turn ended."""

from __future__ import annotations

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from fake_vllm import Request as FakeRequest
from scheduler_world import World, tokens
from undercroft.connector.scheduler.turn_end import turn_end

TOOL_CALL, END_OF_TURN, FULL_STOP = 151658, 151645, 13


def finished(*output: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> Request:
    request = Request("r", [1, 2, 3], SamplingParams(), None)
    request.append_output_token_ids(list(output))
    request.status = status
    return request


def test_turns_with_the_same_last_two_tokens_end_alike():
    called = turn_end(finished(5, 6, TOOL_CALL, END_OF_TURN))
    assert called == turn_end(finished(TOOL_CALL, END_OF_TURN)) != 0
    assert called != turn_end(finished(5, 6, FULL_STOP, END_OF_TURN))
    assert called != turn_end(finished(END_OF_TURN, TOOL_CALL))


@pytest.mark.parametrize("output", [(0,), (0, 0), (END_OF_TURN,), (2**31 - 1, 2**31 - 1)])
def test_a_number_has_32_bits_and_is_not_0(output):
    assert 0 < turn_end(finished(*output)) < 2**32


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED])
def test_a_turn_that_was_stopped_short_says_nothing(status):
    assert turn_end(finished(TOOL_CALL, END_OF_TURN, status=status)) == 0


def test_a_turn_without_tokens_says_nothing():
    assert turn_end(finished()) == 0


def test_the_engine_hears_of_the_end_with_the_request():
    world = World()
    request = FakeRequest("a", tokens(64))
    world.prefill(request)
    request.append(TOOL_CALL, END_OF_TURN)
    request.status = RequestStatus.FINISHED_STOPPED
    world.finish(request)
    assert world.session.turn_ends == {"a": turn_end(finished(TOOL_CALL, END_OF_TURN))}
