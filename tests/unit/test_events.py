"""How the engine's changes become vLLM's KV events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from undercroft.connector.groups import Groups
from undercroft.connector.observe import events as events_module
from undercroft.connector.observe.events import Events, NoEvents, events_of

BLOCK = 16
HASHES = [bytes([index]) * 32 for index in range(8)]
Change = tuple[bool, str, int, bytes, bytes | None]


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM publishes 64 bits of each hash otherwise."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class Session:
    """A session whose events are in ``told``."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, list[Change], bool]] = []
        self.restarts: list[bool] = []

    def take_events(self, restart: bool = False) -> tuple[bool, list[Change], bool] | None:
        self.restarts.append(restart)
        return self.told.pop(0) if self.told else None


def made(groups: Groups | None = None, specs: int = 1) -> tuple[Events, Session]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * specs)
    session = Session()
    groups = groups or Groups(BLOCK, BLOCK, ("full",), (BLOCK,), (0,), 0)
    return Events(session, groups, config), session  # type: ignore[arg-type]


def request(blocks: int = 8, lora: Any = None) -> Any:
    tokens = list(range(blocks * BLOCK + 3))
    return SimpleNamespace(
        request_id="one", block_hashes=HASHES[:blocks], all_token_ids=tokens, lora_request=lora, session_id="a session"
    )


def stored(index: int, tier: str = "host", group: int = 0) -> Change:
    return True, tier, group, HASHES[index], HASHES[index - 1] if index else None


def removed(index: int, tier: str = "host") -> Change:
    return False, tier, 0, HASHES[index], None


def test_a_chain_is_one_event_with_its_tokens() -> None:
    events, session = made()
    events.arrived(request(lora=SimpleNamespace(adapter_id=7, name="adapter")))
    session.told = [(False, [stored(2), stored(3), stored(4)], False)]
    (event,) = events.take()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash) == (HASHES[2:5], HASHES[1])
    assert (event.token_ids, event.block_size) == (list(range(2 * BLOCK, 5 * BLOCK)), BLOCK)
    assert (event.medium, event.locality, event.ownership, event.group_idx) == ("CPU", "LOCAL", None, 0)
    assert (event.lora_id, event.lora_name, event.session_id) == (7, "adapter", "a session")
    assert event.kv_cache_spec_kind == "full_attention"


def test_events_have_the_tokens_after_each_block_if_its_hash_covers_them() -> None:
    events, session = made(Groups(BLOCK, BLOCK, ("full",), (BLOCK,), (0,), 0, lookahead_tokens=2))
    events.arrived(request(3))
    session.told = [(False, [stored(1), stored(2), stored(7)], False)]
    known, unknown = events.take()
    expected = [[2 * BLOCK, 2 * BLOCK + 1], [3 * BLOCK, 3 * BLOCK + 1]]
    if "lookahead_token_ids" not in BlockStored.__struct_fields__:
        pytest.skip("this vLLM has no such field")
    assert known.token_ids == list(range(BLOCK, 3 * BLOCK))
    assert (known.lookahead_token_ids, unknown.lookahead_token_ids) == (expected, None)


def test_events_have_generated_tokens_too() -> None:
    events, session = made()
    growing, whole = request(3), request(8)
    events.arrived(growing)
    growing.block_hashes, growing.all_token_ids = whole.block_hashes, whole.all_token_ids
    session.told = [(False, [stored(index) for index in range(8)], False)]
    first, second = events.take()
    assert first.token_ids + second.token_ids == list(range(8 * BLOCK))
    assert second.parent_block_hash == HASHES[2]


def test_tokens_are_known_when_a_request_has_finished() -> None:
    events, session = made()
    growing, whole = request(1), request(4)
    events.arrived(growing)
    growing.block_hashes, growing.all_token_ids = whole.block_hashes, whole.all_token_ids
    events.finished(growing)
    growing.block_hashes, growing.all_token_ids = [], []
    session.told = [(False, [stored(index) for index in range(4)], False)]
    assert [token for event in events.take() for token in event.token_ids] == list(range(4 * BLOCK))
    assert not events._live


def test_unknown_blocks_are_reported_without_tokens() -> None:
    events, session = made()
    session.told = [(False, [stored(0, tier="disk"), stored(1, tier="disk")], True)]
    (event,) = events.take()
    assert (event.token_ids, event.block_hashes, event.medium) == ([], HASHES[:2], "STORAGE")
    assert events.more


def test_another_chain_tier_or_kind_of_change_is_another_event() -> None:
    events, session = made()
    changes = [stored(0), stored(2), stored(2, tier="disk"), removed(5), removed(1), removed(1, tier="disk")]
    session.told = [(False, changes, False)]
    told = events.take()
    assert [(type(event), event.medium, len(event.block_hashes)) for event in told] == [
        (BlockStored, "CPU", 1),
        (BlockStored, "CPU", 1),
        (BlockStored, "STORAGE", 1),
        (BlockRemoved, "CPU", 2),
        (BlockRemoved, "STORAGE", 1),
    ]


def test_a_clear_is_reported_before_stored_blocks() -> None:
    events, session = made()
    session.told = [(True, [stored(0)], False)]
    told = events.take()
    assert [type(event) for event in told] == [AllBlocksCleared, BlockStored]


def test_nothing_is_no_event_and_ends_the_stepping() -> None:
    events, _ = made()
    assert events.more
    assert events.take() == []
    assert not events.more


def test_after_a_reset_of_the_device_everything_is_asked_for_again_once() -> None:
    events, session = made()
    events.take()
    assert not events.more
    events.forgotten()
    assert events.more, "an idle vLLM steps until all is told"
    session.told = [(False, [stored(0)], False)]
    assert [type(event) for event in events.take()] == [BlockStored]
    events.take()
    assert session.restarts == [False, True, False]


def test_of_several_blocks_in_one_hash_block_only_the_last_is_reported() -> None:
    groups = Groups(BLOCK, BLOCK, ("full", "full"), (BLOCK, 2 * BLOCK), (0, 0), 0)
    events, session = made(groups, specs=2)
    assert [(of.group, of.index) for of in groups.engine_groups] == [(0, 0), (0, 1), (1, 0)]
    events.arrived(request(8))
    session.told = [(False, [(True, False, group, HASHES[1], None) for group in range(3)], False)]
    told = events.take()
    assert [event.group_idx for event in told] == [0, 1]
    assert [(event.block_size, event.token_ids) for event in told] == [(2 * BLOCK, list(range(2 * BLOCK)))] * 2


def test_the_oldest_blocks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "BLOCKS_REMEMBERED", 6)
    monkeypatch.setattr(events_module, "_FORGOTTEN", 4)
    events, session = made()
    events.arrived(request())
    session.told = [(False, [stored(3), stored(4)], False)]
    assert [len(event.token_ids) for event in events.take()] == [0, BLOCK]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, False),
        (SimpleNamespace(enable_kv_cache_events=False), False),
        (SimpleNamespace(enable_kv_cache_events=True), True),
    ],
)
def test_events_are_reported_where_vllm_publishes_them(config: Any, expected: bool) -> None:
    _, session = made()
    caches: Any = SimpleNamespace(kv_cache_groups=[])
    vllm: Any = SimpleNamespace(kv_events_config=config)
    found = events_of(vllm, session, Groups(BLOCK, BLOCK, ("ignored",), (0,), (0,), 0), caches)  # type: ignore[arg-type]
    assert (type(found), found.more) == (Events if expected else NoEvents, expected)
