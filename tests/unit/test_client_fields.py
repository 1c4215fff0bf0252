"""Fields of requests that the operator does not allow, or that nobody knows: they have no effect, and are told."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from core_values import Group
from undercroft import request_params
from undercroft.config import UndercroftConfig
from undercroft.connector.observe.stats import Counts
from undercroft.connector.requests.client_fields import WORDS, ClientFields
from undercroft.connector.requests.explanations import Explanations
from undercroft.errors import ConfigError
from undercroft.metrics import CLIENT_FIELDS_NOT_USED
from undercroft.option_values import CLIENT_FIELDS
from undercroft.threshold import for_connector
from undercroft.threshold.params import ANSWER, EXEMPT


def request(name: str = "r", *, extra_args: Any = None, kv_hints: Any = None, **params: Any) -> Any:
    return SimpleNamespace(
        request_id=name, kv_transfer_params=params or None, kv_hints=kv_hints, num_tokens=100, resumable=False,
        skip_reading_prefix_cache=False, num_prompt_tokens=100,
        sampling_params=SimpleNamespace(extra_args=extra_args or ({"kv_transfer_params": params} if params else None)),
    )  # fmt: skip


def told(of: ClientFields, one: Any) -> Any:
    of.arrived(one)
    return of.finished(one.request_id)


def made(*allowed: str) -> tuple[ClientFields, Counts]:
    counts = Counts()
    return ClientFields(UndercroftConfig.parse({"client_fields": list(allowed)}, {}), counts), counts


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("none", ()),
        ([], ()),
        ("hints", ("hints",)),
        (["hints", "threshold", "hints"], ("threshold", "hints")),
        (list(CLIENT_FIELDS), CLIENT_FIELDS),
    ],
)
def test_the_operator_names_the_fields_that_clients_may_use(given: Any, parsed: tuple[str, ...]) -> None:
    assert UndercroftConfig.parse({"client_fields": given}, {}).client_fields == parsed


def test_by_default_clients_may_use_none() -> None:
    assert UndercroftConfig.parse({}, {}).client_fields == ()
    environment = {"UNDERCROFT_CLIENT_FIELDS": "explain, hints"}
    assert UndercroftConfig.parse({}, environment).client_fields == ("explain", "hints")
    assert UndercroftConfig.parse({}, {"UNDERCROFT_CLIENT_FIELDS": "none"}).client_fields == ()


@pytest.mark.parametrize("given", ["hint", ["hints", "explian"], True, 1, {"hints": True}, ["none"], None])
def test_a_wrong_list_of_fields_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r'client_fields = .*Allowed: "none", or a list of "threshold"'):
        UndercroftConfig.parse({"client_fields": given}, {})


def test_fields_that_are_not_allowed_are_counted_answered_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    of, counts = made()
    refused = {"reason": "not_allowed"}
    expected = {"not_used": {"cache_hit_threshold": refused, "explain": refused, "kv_hints": refused}}
    with caplog.at_level(logging.INFO, logger="vllm.undercroft"):
        for _ in range(3):
            assert told(of, request(explain=True, kv_hints={"pin": True}, cache_hit_threshold=0.9)) == expected
    assert counts.collect()["counters"] == {f"not_used_{name}": 3 for name in WORDS}
    assert len(caplog.records) == 3
    assert all('client_fields to a list with "' in record.getMessage() for record in caplog.records)


def test_fields_outside_of_kv_transfer_params_need_the_same_word() -> None:
    of, _ = made()
    assert told(of, request(extra_args={"cache_hit_threshold": 0.9}))["not_used"].keys() == {"cache_hit_threshold"}
    assert told(of, request(kv_hints=SimpleNamespace(actions=[])))["not_used"].keys() == {"kv_hints"}
    # The frontend's own mark asks for nothing.
    assert told(of, request(extra_args={"cache_hit_threshold": 0.9, EXEMPT: True})) is None


def test_allowed_fields_and_fields_without_a_value_are_not_reported() -> None:
    of, counts = made(*CLIENT_FIELDS)
    assert told(of, request(explain=True, kv_hints={"pin": True}, cache_hit_threshold=0.9)) is None
    of, _ = made()
    assert told(of, request(explain=False, cache_hit_threshold=None)) is None
    assert told(of, request()) is None
    # The configured threshold, here 0, is what the request gets.
    assert told(of, request(cache_hit_threshold=0)) is None
    assert counts.collect() == {}


def test_a_wait_above_the_configurations_is_counted_answered_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    of, counts = made()
    for _ in range(2):
        found = told(of, request(lookup="blocking", lookup_timeout_ms=60_000, promotion_wait="best_effort"))
        over = {"reason": "over_limit"}
        assert found == {"not_used": {"lookup": over, "lookup_timeout_ms": over}}
    assert counts.collect()["counters"] == {"not_used_lookup": 2, "not_used_lookup_timeout_ms": 2}
    assert [record.message.split(" is above")[0] for record in caplog.records] == [
        "undercroft: lookup of a request",
        "undercroft: lookup_timeout_ms of a request",
    ]
    # The scheduler's half reports a value that slips through the frontend.
    assert told(of, request(lookup="sometimes")) is None


def test_a_misspelled_field_is_answered_with_the_nearest_name_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    of, counts = made()
    for _ in range(2):
        found = told(of, request(kv_hint={"pin": True}, do_remote_prefill=False, remote_engine_id="x"))
        assert found == {"not_used": {"kv_hint": {"reason": "unknown", "nearest": "kv_hints"}}}
    assert told(of, request(explian=True)) == {"not_used": {"explian": {"reason": "unknown", "nearest": "explain"}}}
    assert counts.collect()["counters"] == {"not_used_other": 3}
    [record] = caplog.records
    assert "kv_hint of a request is unknown, and ignored: did you mean kv_hints?" in record.message


def test_an_aborted_request_leaves_nothing() -> None:
    of, _ = made()
    assert told(of, request(explain=True)) is not None
    assert of.finished("r") is None and not of._answers


def test_every_field_has_its_counter() -> None:
    always_used = {ANSWER}
    assert set(CLIENT_FIELDS_NOT_USED) == {*request_params.KNOWN, "other"} - always_used
    assert set(WORDS.values()) == set(CLIENT_FIELDS)


class Session:
    def rest(self, request_id: str) -> tuple[str, int | None]:
        return ("never_seen", None)


@pytest.mark.parametrize("may_tell", [True, False])
def test_a_response_explains_only_where_the_operator_allows_it(may_tell: bool) -> None:
    explanations = Explanations(Session(), "off", may_tell=may_tell)  # type: ignore[arg-type]
    one = request(explain=True)
    explanations.asked(one, 32)
    explanations.admitted(one, 0)
    assert (explanations.finished("r") is not None) == may_tell
    assert explanations._asked == {} and explanations._admitted == {}


def test_a_requests_own_threshold_counts_only_where_the_operator_allows_it() -> None:
    strict, open_ = (for_connector(0.5, None, fields) for fields in ((), CLIENT_FIELDS))
    high = request(extra_args={"cache_hit_threshold": 0.9})
    none = request(extra_args={"cache_hit_threshold": 0})
    assert (open_.check(high, 60, 0), open_.check(none, 0, 0)) == (True, False)
    # Neither more nor less than the operator's.
    assert (strict.check(high, 60, 0), strict.check(none, 0, 0)) == (False, True)
    assert (strict.needed_tokens(high), strict.needed_tokens(none)) == (50, 50)
    for policy in (strict, open_):
        policy.collect()
        assert not policy.check(request(extra_args={EXEMPT: True}), 0, 0)
        assert policy.needed_tokens(request(extra_args={EXEMPT: True})) == 0


def test_a_rejection_has_figures_only_where_the_operator_allows_explanations() -> None:
    for fields, has_figures in ((("threshold",), False), (("threshold", "explain"), True)):
        policy = for_connector(0.5, None, fields)
        assert policy.check(request(extra_args={"cache_hit_threshold": 0.9}), 60, 0)
        [rejection] = policy.collect()
        answer = rejection.response_params()["cache_threshold"]
        figures = {"hit_rate", "local_tokens", "external_tokens", "required_tokens"}
        assert answer.keys() - figures == {"threshold", "source"}
        assert answer.keys() & figures == (figures if has_figures else set())


def test_a_pin_of_a_salted_request_is_reached_by_no_other_salt(tmp_path: Any) -> None:
    """The names reach a real engine, which takes at most 64 bytes."""
    from undercroft import _core
    from undercroft.connector.groups import Groups
    from undercroft.connector.requests.hints import RequestHints

    block = 16
    engine = _core.Engine({"host_memory": 16 << 20, "socket_dir": str(tmp_path), "min_load_tokens": 0})
    try:
        session = engine.register("{}", [Group("full", block, 64 << 10)], block)
        hashes = [bytes([index]) * 32 for index in range(4)]
        grant = session.begin_save("save", hashes, 4 * block)
        assert grant is not None
        session.end_transfer(grant.transfer_id, True)
        groups = Groups(block, block, ("full",), (block,), (0,), 0)
        of = RequestHints(session, groups, Counts(), lambda one, computed: 4, may_end=True)

        def hint(salt: str | None, **verbs: Any) -> str:
            one = request(kv_hints=None)
            one.kv_transfer_params = {"kv_hints": verbs}
            one.block_hashes, one.num_computed_tokens, one.cache_salt = hashes, 4 * block, salt
            of.arrived(one)
            answers = of.finished(one)["kv_hints"]  # type: ignore[index]
            return answers[next(iter(verbs))]["answer"]

        name = "n" * 64
        assert hint("a", pin={"id": name}) == "accepted"
        assert [hint(salt, release={"id": name}) for salt in (None, "b")] == ["rejected", "rejected"]
        assert engine.stats()["pins"] == 1
        assert hint("a", release={"id": name}) == "accepted"
        assert engine.stats()["pins"] == 0
    finally:
        engine.close()
