"""Where the lookups of tails begin and end: the deepest that is there is found, and nothing else is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from undercroft.connector.groups import Groups
from undercroft.connector.scheduler.tails import Tails, tail_name
from undercroft.request_params import LookupParams

UNIT, STEP = 640, 64
MODEL = Groups(STEP, STEP, ("state", "full"), (UNIT, UNIT), (0, 0), 0)
ALL: Any = SimpleNamespace(tokens=lambda request: request.num_tokens)
"""Every token may be cached."""


class Session:
    """Knows the tails in ``held``, and those on a pretended disk in ``owed``."""

    def __init__(self, held: set[int] = frozenset(), owed: set[int] = frozenset()) -> None:
        self.held, self.owed = set(held), set(owed)
        self.open: dict[str, list[int]] = {}

    def prefetch(self, name: str, hashes: list[int], computed: int, limit: int, *wait: Any) -> int:
        assert (computed, limit) == (0, UNIT)
        assert name not in self.open
        self.open[name] = hashes
        return 0

    def lookup(self, name: str, hashes: list[int], computed: int, limit: int, *wait: Any) -> SimpleNamespace:
        assert (computed, limit) == (0, UNIT)
        assert self.open[name] == hashes
        end = hashes[0]
        tokens = UNIT if end in self.held and end not in self.owed else 0
        return SimpleNamespace(pending=end in self.owed, tokens=tokens, shared_tokens=0)

    def finish_request(self, name: str) -> None:
        del self.open[name]


def asked(num_tokens: int) -> Any:
    """A request; its hashes are the tokens that they end at."""
    hashes = list(range(STEP, num_tokens + 1, STEP))
    request = SimpleNamespace(request_id="one", num_tokens=num_tokens, block_hashes=hashes)
    return SimpleNamespace(request=request, tails=[], tails_asked=None, lookup=LookupParams(False, 1.0, None))


def test_the_deepest_is_found_and_the_others_are_let_go() -> None:
    session, state = Session({64, 704, 832, 1344}), asked(1200)
    tails = Tails(session, MODEL, ALL)
    assert tails.find(state, UNIT) == 832
    assert list(session.open) == [tail_name("one", 832)]
    assert tails.find(state, UNIT) == 832
    tails.drop(state)
    tails.drop(state)
    assert not session.open


def test_that_there_is_none_is_remembered_for_this_boundary() -> None:
    session, state = Session(), asked(1200)
    tails = Tails(session, MODEL, ALL)
    assert tails.find(state, 0) == 0
    session.held = {64, 704}
    assert tails.find(state, 0) == 0
    assert not session.open
    assert tails.find(state, UNIT) == 704


def test_the_last_token_is_left_to_compute_and_whole_blocks_are_no_tails() -> None:
    session = Session({576, 640, 704})
    assert Tails(session, MODEL, ALL).find(asked(641), 0) == 576
    assert Tails(session, MODEL, ALL).find(asked(704), UNIT) == UNIT
    assert Tails(Session({704}), MODEL, ALL).find(asked(705), UNIT) == 704


def test_a_tail_on_disk_is_found_when_it_has_come_and_is_dropped_if_not() -> None:
    session, state = Session({704}, {832}), asked(1200)
    tails = Tails(session, MODEL, ALL)
    assert tails.find(state, UNIT) is None
    session.owed, session.held = set(), {704, 832}
    assert tails.find(state, UNIT) == 832
    session.owed = {832}
    assert tails.find(state, UNIT) is None
    tails.drop(state)
    assert not session.open


@pytest.mark.parametrize(
    "groups",
    [
        Groups(UNIT, UNIT, ("state", "full"), (UNIT, UNIT), (0, 0), 0),
        Groups(STEP, STEP, ("full", "full"), (UNIT, UNIT), (0, 0), 0),
        Groups(STEP, STEP, ("state", "sliding_window"), (UNIT, UNIT), (0, 64), 0),
        Groups(STEP, STEP, ("state", "full"), (UNIT, UNIT), (0, 0), STEP),
        Groups(STEP, STEP, ("state", "full"), (UNIT, UNIT // 2), (0, 0), 0),
    ],
)
def test_models_without_tails_are_not_looked_up(groups: Groups) -> None:
    session = Session({704})
    assert groups.tail_step == 0
    assert Tails(session, groups, ALL).find(asked(1200), UNIT) == UNIT
    assert not session.open
