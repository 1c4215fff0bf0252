from __future__ import annotations

from dataclasses import replace

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft.config import UndercroftConfig
from undercroft.request_params import KNOWN, InvalidParameterError, LookupParams, check, misspelled, of_request

FOREIGN = (
    "dcp_size", "disagg_spec", "do_remote_decode", "do_remote_prefill", "hidden_states_path", "is_request_leader",
    "pp_size", "prompt_token_ids", "remote_block_ids", "remote_block_size", "remote_blocks_expiry_time",
    "remote_bootstrap_addr", "remote_dp_rank", "remote_dp_rank_override", "remote_dp_size", "remote_dp_size_local",
    "remote_engine_id", "remote_handshake_port", "remote_host", "remote_hosts", "remote_notify_port",
    "remote_num_tokens", "remote_port", "remote_prefill_cached_tokens", "remote_request_id", "remote_tp_size",
    "tp_size", "transfer_id", "lmcache.tag.user", "lmcache.skip_save", "ttl", "tenant", "pin", "hint",
)  # fmt: skip
"""Names that vLLM's connectors and others read in the same place."""
CONFIG = UndercroftConfig.parse(
    {"lookup": "blocking", "lookup_timeout_ms": 50, "promotion_wait": {"base_ms": 5, "per_1k_tokens_ms": 2}}, {}
)
ASYNC = UndercroftConfig.parse({}, {})
COMPLETE = UndercroftConfig.parse({"promotion_wait": "complete"}, {})
NONE = UndercroftConfig.parse({"promotion_wait": "best_effort"}, {})


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, LookupParams(True, 0.05, (5, 2))),
        ("not a mapping", LookupParams(True, 0.05, (5, 2))),
        ({"do_remote_prefill": True, "lookup": None}, LookupParams(True, 0.05, (5, 2))),
        ({"lookup": "async"}, LookupParams(False, 0.05, (5, 2))),
        ({"lookup": "blocking", "lookup_timeout_ms": 20}, LookupParams(True, 0.02, (5, 2))),
        ({"promotion_wait": "best_effort"}, LookupParams(True, 0.05, (0, 0))),
        ({"promotion_wait": {"base_ms": 4, "per_1k_tokens_ms": 2}}, LookupParams(True, 0.05, (4, 2))),
    ],
)
def test_a_request_for_less_waiting_overrides_the_configuration(params, expected):
    assert of_request(params, CONFIG) == expected


@pytest.mark.parametrize(
    ("params", "config", "expected"),
    [
        ({"lookup": "blocking"}, ASYNC, LookupParams(False, 0.05, None, True)),
        ({"lookup_timeout_ms": 60_000}, CONFIG, LookupParams(True, 0.05, (5, 2))),
        ({"promotion_wait": "complete"}, CONFIG, LookupParams(True, 0.05, (5, 2))),
        ({"promotion_wait": "planned"}, CONFIG, LookupParams(True, 0.05, (5, 2))),
        ({"promotion_wait": {"base_ms": 7, "per_1k_tokens_ms": 1}}, CONFIG, LookupParams(True, 0.05, (5, 1))),
        ({"promotion_wait": "complete"}, ASYNC, LookupParams(False, 0.05, None, True)),
        ({"promotion_wait": {"base_ms": 3_600_000}}, ASYNC, LookupParams(False, 0.05, None, True)),
        ({"promotion_wait": "complete"}, NONE, LookupParams(False, 0.05, (0, 0))),
        ({"promotion_wait": "planned"}, NONE, LookupParams(False, 0.05, (0, 0))),
    ],
)
def test_a_request_that_asks_for_more_waiting_gets_the_configured_one(params, config, expected):
    assert of_request(params, config) == replace(expected, capped=tuple(params))


@pytest.mark.parametrize("wait", ["planned", "best_effort", "complete", {"base_ms": 60_000}])
def test_a_configuration_without_a_limit_allows_every_wait(wait):
    assert of_request({"promotion_wait": wait}, COMPLETE).capped == ()


def test_a_misspelled_field_is_distinguished_from_fields_of_other_connectors():
    given = {
        "kv_hint": {},
        "lookup_timeout": 5,
        "Explain": True,
        "cache_hit_treshold": 0.5,
        "promotionwait": "complete",
        "cache_hit_threshold_anwser": "error",
    }
    assert misspelled(given) == {
        "kv_hint": "kv_hints",
        "lookup_timeout": "lookup_timeout_ms",
        "Explain": "explain",
        "cache_hit_treshold": "cache_hit_threshold",
        "promotionwait": "promotion_wait",
        "cache_hit_threshold_anwser": "cache_hit_threshold_answer",
    }
    assert misspelled(dict.fromkeys((*KNOWN, *FOREIGN))) == {}
    assert misspelled("kv_hint") == {}
    # A client may send any number of names of any length.
    assert len(misspelled({f"kv_hint{index}": 1 for index in range(1000)})) == 32
    assert max(map(len, misspelled({"kv_hints" + "s" * 10**6: 1, "kv_hint": 1}))) < 40


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
def test_an_invalid_parameter_is_named(params):
    (name,) = params
    with pytest.raises(InvalidParameterError, match=f"kv_transfer_params.{name} = ") as caught:
        check(params)
    assert caught.value.name == name
    assert "Allowed: " in str(caught.value)


def owed(params, **options) -> tuple[World, Request]:
    """A request whose prefix is pending on disk."""
    world = World(lookup_timeout_ms=40, **options)
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    return world, Request("b", [*prefix, 1], kv_transfer_params=params)


def test_no_request_makes_the_scheduler_wait_where_the_operator_has_not_said_so():
    world, request = owed({"lookup": "blocking", "lookup_timeout_ms": 60_000, "promotion_wait": "complete"})
    world.session.delivers = True
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert "wait" not in [call[0] for call in world.session.calls]


def test_one_request_is_asked_again_where_others_wait():
    world, request = owed({"lookup": "async"}, lookup="blocking")
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert "wait" not in [call[0] for call in world.session.calls]


def test_no_request_waits_for_longer_than_the_operator_allows():
    world, request = owed({"lookup_timeout_ms": 60_000}, lookup="blocking")
    world.connector.get_num_new_matched_tokens(request, 0)
    [(_, name, timeout_s)] = [call for call in world.session.calls if call[0] == "wait"]
    assert (name, timeout_s) == ("b", pytest.approx(0.04))


def test_a_parameter_that_slips_through_is_reported_and_the_configuration_counts():
    world, request = owed({"lookup": "sometimes"})
    world.connector.on_new_request(request)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert [hook for hook, _ in world.errors] == ["on_new_request"]
