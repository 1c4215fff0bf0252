"""Offered blocks of windows and states: the blocks before a boundary, never null ones; states that end a block."""

from __future__ import annotations

from undercroft.connector.groups import Groups
from undercroft.connector.scheduler.offers import BoundaryState, Offer, state_blocks, window_offers

WINDOW = Groups(16, 16, ("sliding_window", "full"), (16, 16), (33, 0), 0)
MIXED = Groups(16, 32, ("sliding_window", "full"), (16, 32), (33, 0), 0)
CHUNKS = Groups(16, 16, ("chunked_local", "full"), (16, 16), (64, 0), 0)


def test_the_blocks_before_each_boundary() -> None:
    table = list(range(1, 11))
    assert window_offers(WINDOW, (table, table), [64, 160]) == [Offer(0, 2, 4), Offer(0, 8, 10)]
    assert window_offers(WINDOW, (table, table), [64, 80]) == [Offer(0, 2, 5)]
    assert window_offers(WINDOW, (table, table), []) == []


def test_null_blocks_and_blocks_past_the_table_are_left_out() -> None:
    assert window_offers(WINDOW, ([0, 0, 0, 7], [1, 2, 3, 4]), [64]) == [Offer(0, 3, 4)]
    assert window_offers(WINDOW, ([0, 0, 6], [1, 2, 3]), [64]) == [Offer(0, 2, 3)]


def test_chunks_begin_anew() -> None:
    table = list(range(1, 11))
    assert window_offers(CHUNKS, (table, table), [64]) == []
    assert window_offers(CHUNKS, (table, table), [96]) == [Offer(0, 4, 6)]


def test_smaller_blocks_are_groups_of_the_engine_of_their_own() -> None:
    first, second, full = MIXED.engine_groups
    assert (first.index, second.index, full.index) == (0, 1, 0)
    # The window of 32 tokens before 64 is the second unit, both halves; a null half is left out.
    assert window_offers(MIXED, ([0, 0, 3, 4], [1, 2]), [64]) == [Offer(0, 1, 2), Offer(1, 1, 2)]
    assert window_offers(MIXED, ([0, 0, 0, 4], [1, 2]), [64]) == [Offer(1, 1, 2)]


def test_a_state_inside_a_block_is_no_state_at_its_start() -> None:
    offered = [BoundaryState(*state) for state in [(0, 7, 640), (0, 8, 704), (0, 9, 1280), (1, 6, 640)]]
    few = Groups(64, 64, ("state", "full"), (640, 640), (0, 0), 0)
    assert state_blocks(few, offered) == {(0, 0): 7, (0, 1): 9}
    # So many groups that the index goes by hashes instead of blocks.
    kinds = ("state",) + ("full",) * 40
    many = Groups(64, 64, kinds, (640,) * len(kinds), (0,) * len(kinds), 0)
    assert many.engine_block_size == 64
    assert state_blocks(many, offered) == {(0, 0): 7, (0, 1): 9}
