"""Hints of requests: their forms, and when the engine is given them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from undercroft import hints
from undercroft.connector.groups import Groups
from undercroft.connector.observe.stats import Counts
from undercroft.connector.requests.hints import MAX_ASKS, RequestHints

BLOCK = 16
HASHES = [bytes([index]) * 32 for index in range(4)]


def parsed(**verbs: Any) -> hints.Hints:
    return hints.of_request({hints.NAME: verbs})


def action(verb: str, payload: Any, version: str = "1.0") -> Any:
    return SimpleNamespace(action_id=f"id of {verb}", action_type=verb, action_version=version, payload=payload)


def test_a_request_without_hints_has_none() -> None:
    for params in (None, {}, {"do_remote_prefill": True}, "text"):
        assert hints.of_request(params) is hints.NONE


def test_hints_are_carried_out_in_one_order_and_answered_as_they_were_written() -> None:
    found = parsed(release={"id": "a"}, retain={"ttl_s": 5, "tokens": 32}, prefetch=True)
    assert [(hint.verb, hint.key) for hint in found.hints] == [
        ("prefetch", "prefetch"),
        ("pin", "retain"),
        ("release", "release"),
    ]
    assert (found.hints[1].ttl_s, found.hints[1].tokens, found.hints[2].name) == (5.0, 32, "a")
    assert found.computes


def test_unknown_verbs_and_versions_are_not_carried_out() -> None:
    found = parsed(share={"with": "all"}, pinn={}, pin={})
    assert (found.unknown, len(found.hints)) == ({"share": "", "pinn": "pin"}, 1)
    typed = SimpleNamespace(
        actions=[action("kv.pin", {"compute": False}), action("pin", {}, "9"), action("kv.fetch", {})]
    )
    found = hints.of_request(None, typed)
    assert (found.computes, [hint.key for hint in found.hints]) == (False, ["id of kv.pin"])
    assert found.unknown == {"id of pin": "pin", "id of kv.fetch": "prefetch"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("all", "kv_transfer_params.kv_hints = 'all'"),
        ({"pin": 5}, "kv_hints.pin = 5"),
        ({"pin": {"ttl": 5}}, "hashes, id, tokens, ttl_s (did you mean 'ttl_s'?)"),
        ({"pin": {"ttl_s": 0.5}}, "kv_hints.pin.ttl_s = 0.5"),
        ({"pin": {"ttl_s": float("nan")}}, "1 to 86400"),
        ({"pin": {"ttl_s": True}}, "ttl_s = True"),
        ({"pin": {"id": "x" * 65}}, "1 to 64 bytes"),
        ({"release": {"id": 7}}, "kv_hints.release.id = 7"),
        ({"demote": {"tokens": 0}}, "kv_hints.demote.tokens = 0"),
        ({"pin": {"hashes": []}}, "block hashes"),
        ({"pin": {"hashes": ["xy"]}}, "hashes = ['xy']"),
        ({"pin": {"hashes": ["00", "0000"]}}, "hexadecimal"),
        ({"prefetch": {"tokens": 1.5}}, "a whole number"),
        ({"compute": 1}, "kv_hints.compute = 1"),
    ],
)
def test_an_invalid_hint_is_named_with_the_allowed_values(given: Any, named: str) -> None:
    with pytest.raises(hints.InvalidHintError) as error:
        hints.of_request({hints.NAME: given})
    assert named in str(error.value)
    assert "allowed is" in str(error.value)


class Session:
    """Accepts every hint, unless it is to say otherwise."""

    def __init__(self) -> None:
        self.given: list[tuple[str, int, float, str]] = []
        self.finished: list[str] = []
        self.hashes: list[bytes] = []
        self.answer: tuple[str, int, str] | None = None

    def hint(
        self, request_id: str, hashes: Any, verb: str, tokens: int, ttl_s: float, name: str
    ) -> tuple[str, int, str]:
        self.hashes = list(hashes)
        self.given.append((verb, tokens, ttl_s, name))
        return self.answer or ("accepted", tokens, "")

    def finish_request(self, request_id: str) -> None:
        self.finished.append(request_id)


def made(may_end: bool = True, is_allowed: bool = True) -> tuple[RequestHints, Session, Counts]:
    session, counts = Session(), Counts()
    groups = Groups(BLOCK, BLOCK, ("full",), (BLOCK,), (0,), 0)
    complete = lambda request, computed: computed // BLOCK  # noqa: E731
    found = RequestHints(session, groups, counts, complete, may_end=may_end, is_allowed=is_allowed)  # type: ignore[arg-type]
    return found, session, counts


def request(**verbs: Any) -> Any:
    return SimpleNamespace(
        request_id="r", kv_transfer_params={hints.NAME: verbs} if verbs else None, sampling_params=object(),
        resumable=False, num_tokens=70, num_computed_tokens=50, block_hashes=HASHES,
    )  # fmt: skip


def test_prefetches_are_given_at_the_arrival_and_the_others_at_the_end() -> None:
    of, session, _ = made()
    one = request(prefetch={"tokens": 20}, pin={"id": "chat", "ttl_s": 9}, demote={})
    of.arrived(one)
    assert session.given == [("prefetch", 20, 300.0, "")]
    assert not of.holds_back(one)
    told = of.finished(one)
    assert session.hashes == HASHES
    # The last tokens have no whole block.
    assert session.given[1:] == [("pin", 48, 9.0, "chat"), ("demote", 48, 300.0, "")]
    accepted = {"answer": "accepted", "tokens": 48}
    assert told == {"kv_hints": {"prefetch": accepted | {"tokens": 20}, "pin": accepted, "demote": accepted}}
    assert session.finished == ["r\0hint"] * 2
    assert of.finished(one) is None
    assert of.collect() == []


def test_a_hint_may_name_other_blocks() -> None:
    of, session, _ = made()
    one = request(pin={"hashes": ["ab" * 32, "cd" * 32]}, compute=False)
    of.arrived(one)
    assert session.hashes == [b"\xab" * 32, b"\xcd" * 32]
    assert session.given == [("pin", 2 * BLOCK, 300.0, "")]


@pytest.mark.parametrize(
    ("verbs", "is_allowed", "wants"),
    [
        ({"pin": {}}, True, True),
        ({"prefetch": True}, True, True),
        ({"prefetch": {"hashes": ["ab" * 32]}}, True, False),
        ({"demote": {}}, True, False),
        ({"pin": {}}, False, False),
        ({}, True, False),
    ],
)
def test_blocks_that_a_hint_names_are_wanted_until_the_request_ends(verbs: Any, is_allowed: bool, wants: bool) -> None:
    given, *_ = made(is_allowed=is_allowed)
    asks = request(**verbs)
    given.arrived(asks)
    assert given.wants("r") is wants
    given.finished(asks)
    assert not given.wants("r")


def test_a_request_for_its_hints_alone_is_held_back_until_it_is_ended() -> None:
    of, session, counts = made()
    one = request(prefetch={}, pin={}, compute=False)
    session.answer = ("rejected", 0, "unavailable")
    of.arrived(one)
    [ended] = of.collect()
    rejected = {"answer": "rejected", "tokens": 0, "reason": "unavailable"}
    assert (ended.request_id, ended.reason) == ("r", "kv_hint")
    assert ended.response_params() == {"kv_hints": {"prefetch": rejected, "pin": rejected}}
    assert counts.collect()["counters"] == {"hints_unserved": 2}
    # A scheduler that never ends it does not starve it.
    assert [of.holds_back(one) for _ in range(MAX_ASKS + 1)] == [True] * MAX_ASKS + [False]
    assert of.finished(one) is None
    assert len(session.given) == 2


def test_where_vllm_cannot_end_a_request_it_is_computed() -> None:
    of, _, _ = made(may_end=False)
    one = request(pin={}, compute=False)
    of.arrived(one)
    assert (of.collect(), of.holds_back(one)) == ([], False)
    assert of.finished(one) is not None


def test_a_request_without_hints_costs_nothing() -> None:
    of, session, _ = made()
    one = request()
    of.arrived(one)
    assert (of.holds_back(one), of.finished(one), session.given) == (False, None, [])


def test_an_unknown_hint_is_answered_with_the_nearest_name_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    of, session, counts = made()
    answers = {"pinn": {"answer": "unknown", "nearest": "pin"}, "share": {"answer": "unknown"}}
    for _ in range(2):
        one = request(pinn=True, share={}, pin=True)
        of.arrived(one)
        assert of.finished(one) == {"kv_hints": answers | {"pin": {"answer": "accepted", "tokens": 48}}}
    of.arrived(request(pinn=True, compute=False))
    assert [ended.answers for ended in of.collect()] == [{"pinn": answers["pinn"]}]
    assert len(session.given) == 2
    assert counts.collect()["counters"] == {"hints_unknown": 5}
    [record] = caplog.records
    assert "the hint pinn of a request is unknown, and ignored; did you mean pin?" in record.message


def test_where_hints_are_not_allowed_the_engine_is_asked_nothing() -> None:
    of, session, _ = made(is_allowed=False)
    refused = {"answer": "rejected", "tokens": 0, "reason": "not_allowed"}
    one = request(prefetch={}, pin={"hashes": ["ab" * 32]})
    of.arrived(one)
    assert of.finished(one) == {"kv_hints": {"prefetch": refused, "pin": refused}}
    of.arrived(request(release={"id": "a"}, compute=False))
    assert [ended.answers for ended in of.collect()] == [{"release": refused}]
    assert (session.given, session.finished) == ([], [])


def test_pins_of_one_name_are_as_many_as_there_are_salts() -> None:
    of, session, _ = made()
    for salt in (None, "tenant a", "tenant b", "tenant b"):
        one = request(pin={"id": "x" * 64}, release={"id": "y"})
        one.cache_salt = salt
        of.arrived(one)
        of.finished(one)
    pins = [name for verb, _, _, name in session.given if verb == "pin"]
    assert pins[0] == "x" * 64, "without a salt the command line finds the pin by its name"
    assert len(set(pins)) == 3 and pins[2] == pins[3]
    # The engine refuses longer names.
    assert all(len(name) <= hints.PIN_NAME_MAX and "tenant" not in name for name in pins)
    assert len({name for verb, _, _, name in session.given if verb == "release"}) == 3
