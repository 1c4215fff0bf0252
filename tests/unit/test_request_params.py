from __future__ import annotations

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft.config import UndercroftConfig
from undercroft.request_params import InvalidParameterError, LookupParams, check, of_request

CONFIG = UndercroftConfig.parse({"promotion_wait": {"base_ms": 5, "per_1k_tokens_ms": 2}}, {})


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, LookupParams(False, 0.05, (5, 2))),
        ("not a mapping", LookupParams(False, 0.05, (5, 2))),
        ({"do_remote_prefill": True, "lookup": None}, LookupParams(False, 0.05, (5, 2))),
        ({"lookup": "blocking", "lookup_timeout_ms": 200}, LookupParams(True, 0.2, (5, 2))),
        ({"promotion_wait": "complete"}, LookupParams(False, 0.05, None)),
        ({"promotion_wait": "best_effort"}, LookupParams(False, 0.05, (0, 0))),
        ({"promotion_wait": {"base_ms": 7}}, LookupParams(False, 0.05, (7, 0))),
    ],
)
def test_a_request_goes_before_the_configuration(params, expected):
    assert of_request(params, CONFIG) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"lookup": "sometimes"},
        {"lookup": True},
        {"lookup_timeout_ms": -1},
        {"lookup_timeout_ms": "5"},
        {"promotion_wait": "forever"},
        {"promotion_wait": {"base": 1}},
    ],
)
def test_what_cannot_be_used_is_named(params):
    (name,) = params
    with pytest.raises(InvalidParameterError, match=f"kv_transfer_params.{name} = ") as caught:
        check(params)
    assert caught.value.name == name
    assert "Allowed: " in str(caught.value)


def owed(params) -> tuple[World, Request]:
    """A request whose prefix is pending on disk."""
    world = World(lookup_timeout_ms=40)
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    return world, Request("b", [*prefix, 1], kv_transfer_params=params)


def test_one_request_waits_where_others_are_asked_again():
    world, request = owed({"lookup": "blocking", "lookup_timeout_ms": 70})
    world.session.delivers = True
    assert world.connector.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    assert ("wait", "b", 0.07) in world.session.calls
    world, request = owed(None)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)


def test_a_parameter_that_slips_through_is_reported_and_the_configuration_counts():
    world, request = owed({"lookup": "sometimes"})
    world.connector.on_new_request(request)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert [hook for hook, _ in world.errors] == ["on_new_request"]
