"""Where a hit may end at the deepest: with the prompt, before its last token, or before an input without a key."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens
from undercroft.connector.groups import Groups


def test_hit_may_end_with_the_prompt():
    """vLLM then computes the last token again."""
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", prefix)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    world.admit(request, external=4 * BLOCK)
    meta = world.step()
    (job,) = meta.loads
    assert len(job.groups[0].block_ids) == 4
    world.answer(meta)
    assert world.connector.get_num_new_matched_tokens(Request("c", prefix), 3 * BLOCK) == (BLOCK, True)
    assert world.connector.get_num_new_matched_tokens(Request("d", prefix), 4 * BLOCK) == (0, False)


def test_hit_ends_before_a_last_token_whose_block_has_no_hash_yet():
    """With lookahead hashes the hash of the last block comes with the next token."""
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", prefix)
    request.block_hashes.pop()
    assert world.connector.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)
    assert world.session.calls[-1] == ("lookup", "b", 0, 3 * BLOCK)


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local", "state", "ignored"])
def test_hit_leaves_out_the_last_token_unless_all_attention_is_full(kind):
    """The last token needs the state before it, or a window that begins a token earlier than the hit's."""
    size, window = (0 if kind == "ignored" else BLOCK), (2 * BLOCK if "o" in kind else 0)
    world = World(groups=Groups(BLOCK, BLOCK, ("full", kind), (BLOCK, size), (0, window), 0))
    world.connector.on_new_request(Request("a", tokens(4 * BLOCK)))
    world.connector.get_num_new_matched_tokens(Request("b", tokens(4 * BLOCK)), 0)
    assert [call[3] for call in world.session.calls if call[0] in ("prefetch", "lookup")] == [3 * BLOCK] * 2


def test_blocks_behind_a_picture_with_a_name_from_a_client_are_neither_saved_nor_looked_up():
    picture = SimpleNamespace(
        identifier="photo-1", mm_hash="photo-1", mm_position=SimpleNamespace(offset=2 * BLOCK + 3, length=BLOCK)
    )
    for unique, blocks in ((False, 2), (True, 4)):
        world = World(unique_media_uuids=unique)
        first = Request("a", tokens(4 * BLOCK), mm_features=[picture])
        (job,) = world.prefill(first).saves
        assert len(job.groups[0].block_ids) == blocks
        again = Request("b", tokens(4 * BLOCK), mm_features=[picture])
        assert world.connector.get_num_new_matched_tokens(again, 0) == (blocks * BLOCK, True)
        assert not world.errors
