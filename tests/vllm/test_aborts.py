"""A request aborted in each state leaves nothing behind, and disturbs no other request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_checks import (
    BLOCK,
    Reference,
    add,
    finish,
    flush,
    nothing_left,
    override_session,
    stats,
    step,
    step_until,
    worker,
)
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

LONG = prompt(897)
OTHER = LONG[:700] + prompt(500, 3)
HIT = 896


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Configuration whose disk holds LONG."""
    options = {
        "host_memory": "64MiB",
        "disk_path": str(tmp_path_factory.mktemp("aborts")),
        "disk_capacity": "256MiB",
    }
    one = Engine(llama, options, blocks=64)
    one.generate(LONG, 4)
    nothing_left(one)
    one.close()
    return options


@pytest.fixture
def one(llama: Path, saved: dict[str, object]) -> Iterator[Engine]:
    """An engine whose cache is on disk only."""
    engine = Engine(llama, saved, blocks=64, max_num_seqs=2)
    yield engine
    engine.close()


def abort(one: Engine, name: str) -> None:
    one.llm.llm_engine.abort_request([name])


def still_right(one: Engine, reference: Callable[..., list[int]]) -> None:
    nothing_left(one)
    again = one.generate(LONG, 16)
    assert (again.cached, again.tokens) == (HIT, reference(LONG, 16))
    nothing_left(one)


def test_while_queued(one: Engine, reference: Reference) -> None:
    for name in ("first", "second"):
        add(one, name, prompt(300, seed=len(name)), 40)
    step(one, 3)
    add(one, "aborted", LONG, 4)
    step(one, 2)
    assert one.scheduler.get_num_unfinished_requests() == 3
    abort(one, "aborted")
    assert set(finish(one)) == {"first", "second"}
    still_right(one, reference)


def test_before_the_first_step(one: Engine, reference: Reference) -> None:
    """The reads that its arrival has started end without a request."""
    add(one, "aborted", LONG, 4)
    abort(one, "aborted")
    still_right(one, reference)


class Pending:
    """A lookup's answer that never comes."""

    pending, tokens, shared_tokens = True, 0, 0


def test_while_the_answer_is_pending(one: Engine, reference: Reference) -> None:
    # The prefetch at its arrival reaches the engine, which then knows the lookup.
    session = override_session(one, lookup=lambda *args: Pending)
    add(one, "aborted", LONG, 4)
    add(one, "kept", OTHER, 4)
    step(one, 3)
    assert stats(one)["active_lookups"] == 2
    abort(one, "aborted")
    assert stats(one)["active_lookups"] == 1
    session.methods.clear()
    # As a minute later: the core, which knows nothing of this wait, does not end it.
    one.connector._scheduler.lookups.waiting._deadline = 0.0
    assert finish(one) == {"kept": reference(OTHER, 4)}
    still_right(one, reference)


def test_while_it_loads(one: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    add(one, "aborted", LONG, 4)
    with monkeypatch.context() as held:
        # The end of the copies goes unnoticed for as long as this lasts.
        held.setattr(worker(), "_collect", lambda: None)
        step_until(one, lambda: stats(one)["loads"] == 1)
        step(one, 3)
        abort(one, "aborted")
        step(one, 3)
        # No other request may get its blocks before the copy into them has ended.
        assert one.device_blocks_in_use() >= HIT // BLOCK
        assert stats(one)["loads"] == 1
    still_right(one, reference)
    assert stats(one)["load_failures"] == 0


def test_while_it_runs(one: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """And while blocks of it are being saved."""
    ids = prompt(700, seed=8)
    add(one, "aborted", ids, 100)
    with monkeypatch.context() as held:
        held.setattr(worker(), "_collect", lambda: None)
        step(one, 4)
        assert stats(one)["saves"] >= 1
        abort(one, "aborted")
        step(one, 2)
        assert one.device_blocks_in_use() >= 700 // BLOCK
    nothing_left(one)
    assert one.generate(ids, 4).cached == 700 // BLOCK * BLOCK
    still_right(one, reference)
    flush(one)
