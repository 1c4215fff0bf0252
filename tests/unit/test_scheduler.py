from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from fake_core import SLOT
from fake_vllm import BLOCK, Blocks, Request, worker_output
from scheduler_world import World, tokens
from undercroft.connector.groups import Groups
from undercroft.connector.scheduler import due_saves, lookups


def test_prefill_saves_every_full_block_with_its_device_block():
    world = World()
    request = Request("a", tokens(3 * BLOCK + 5))
    meta = world.prefill(request)
    (job,) = meta.saves
    (copy,) = job.groups
    assert job.request_id == "a"
    assert copy.block_ids.dtype == np.int64
    assert copy.block_ids.tolist() == world.tables["a"][0][:3]
    assert copy.offsets.tolist() == [0, SLOT, 2 * SLOT]
    assert (meta.arena_socket, meta.arena_id) == ("/fake.sock", 7)
    assert len(world.session.host) == 3


def test_source_blocks_are_pinned_until_every_rank_has_acknowledged():
    world = World(ranks=2)
    request = Request("a", tokens(2 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    meta = world.step([(request, 2 * BLOCK)])
    table = world.tables["a"][0]
    world.finish(request)
    assert [world.pool.blocks[b].ref_cnt for b in table] == [1, 1]
    assert world.connector.has_pending_push_work()
    assert world.connector.has_pending_block_frees()
    half = worker_output(meta, ranks=1)
    world.connector.update_connector_output(half)
    assert world.pool.freed == []
    assert not world.session.host
    world.connector.update_connector_output(half)
    # Deepest first, as vLLM frees a request.
    assert world.pool.freed == table[::-1]
    assert len(world.session.host) == 2
    assert not world.connector.has_pending_push_work()
    assert not world.connector.has_pending_block_frees()
    # An answer that arrives twice changes nothing.
    world.connector.update_connector_output(half)
    assert len(world.session.host) == 2


def test_pins_of_running_requests_do_not_hold_up_preemption():
    world = World()
    request = Request("a", tokens(2 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    world.step([(request, 2 * BLOCK)])
    assert world.connector.has_pending_push_work()
    assert not world.connector.has_pending_block_frees()


def test_failed_save_is_dropped():
    world = World()
    request = Request("a", tokens(2 * BLOCK))
    world.connector.on_new_request(request)
    world.admit(request)
    meta = world.step([(request, 2 * BLOCK)])
    world.answer(meta, failed_saves={meta.saves[0].transfer_id})
    assert not world.session.host
    assert not world.session.reserved
    assert all(world.pool.blocks[b].ref_cnt == 1 for b in world.tables["a"][0])


def test_chunked_prefill_and_decode_save_each_block_once():
    world = World()
    request = Request("a", tokens(4 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    saved = []
    for chunk in (10, 30, 24):
        meta = world.step([(request, chunk)])
        saved += [slot for job in meta.saves for copy in job.groups for slot in copy.block_ids.tolist()]
        world.answer(meta)
    assert saved == world.tables["a"][0]
    world.tables["a"] = (world.tables["a"][0] + world.pool.allocate(1),)
    for token in range(BLOCK + 1):
        request.append(token)
        meta = world.step([(request, 1)])
        # Token t is computed in the step after it was sampled: the block is full in step BLOCK.
        assert bool(meta.saves) == (token == BLOCK - 1)
        world.answer(meta)
    assert len(world.session.host) == 5


def test_save_prompt_leaves_generated_blocks_out():
    world = World(save="prompt")
    request = Request("a", tokens(BLOCK + 8))
    world.prefill(request)
    for token in range(BLOCK):
        request.append(token)
        world.step([(request, 1)])
    world.finish(request)
    assert len(world.session.host) == 1


def test_rejected_drafts_are_not_saved():
    world = World()
    request = Request("a", tokens(BLOCK - 2))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    world.step([(request, BLOCK - 2)])
    request.append(1)
    # One sampled token and four drafts: the block is full on the device, but of tokens that may be rejected.
    meta = world.step([(request, 5)])
    assert not meta.saves


def test_tokens_that_draft_layers_compute_again_are_not_saved_yet():
    world = World()
    manager = SimpleNamespace(coordinator=SimpleNamespace(num_reprefillable_tokens=2))
    world.connector.bind_kv_cache_manager(manager)
    request = Request("a", tokens(2 * BLOCK + 1))
    world.prefill(request)
    assert len(world.session.host) == 1, "the second block ends a token before the last one"
    request.append(1)
    world.answer(world.step([(request, 1)]))
    assert len(world.session.host) == 2
    for token in range(BLOCK - 2):
        request.append(token)
        world.answer(world.step([(request, 1)]))
    world.finish(request)
    assert world.step().saves == [], "vLLM never caches the last ones"


def test_blocks_whose_hash_came_after_the_last_step_are_saved_at_the_end():
    world = World()
    request = Request("a", tokens(BLOCK - 1))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    world.step([(request, BLOCK - 1)])
    # Asynchronous scheduling: the next token's KV is computed before its value is known here.
    meta = world.step([(request, 1)])
    assert not meta.saves
    request.append(5)
    table = world.tables["a"][0]
    world.finish(request)
    assert world.pool.blocks[table[0]].ref_cnt == 1
    assert world.connector.has_pending_push_work()
    meta = world.step()
    assert meta.saves[0].groups[0].block_ids.tolist() == table
    world.answer(meta)
    assert len(world.session.host) == 1
    assert world.pool.freed == table


def test_a_hit_is_loaded_by_position_behind_the_device_blocks():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", [*prefix, 1, 2]))
    request = Request("b", [*prefix, 7, 8, 9])
    world.connector.on_new_request(request)
    assert world.connector.get_num_new_matched_tokens(request, BLOCK) == (3 * BLOCK, True)
    world.admit(request, external=3 * BLOCK)
    table = world.tables["b"][0]
    meta = world.step()
    (job,) = meta.loads
    assert job.groups[0].block_ids.tolist() == table[1:4]
    assert job.groups[0].offsets.tolist() == [SLOT, 2 * SLOT, 3 * SLOT]
    assert world.connector.has_pending_push_work()
    assert ("end_lookup", "b") not in world.session.calls
    world.answer(meta)
    assert ("end_transfer", job.transfer_id, True) in world.session.calls
    # vLLM's second call, after the load.
    world.connector.update_state_after_alloc(request, Blocks((table,)), 0)
    assert ("end_lookup", "b") in world.session.calls
    assert not world.connector.has_pending_push_work()
    # Loaded blocks are not saved again.
    request.num_computed_tokens = 4 * BLOCK
    assert not world.step([(request, 3)]).saves


def test_given_number_of_external_tokens_counts_not_the_answer():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", [*prefix, 1])
    assert world.connector.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    world.admit(request, external=2 * BLOCK)
    (job,) = world.step().loads
    assert len(job.groups[0].block_ids) == 2


def test_small_gain_is_not_loaded():
    world = World(min_load_tokens=2 * BLOCK)
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", [*prefix, 1])
    assert world.connector.get_num_new_matched_tokens(request, 3 * BLOCK) == (0, False)
    assert world.connector.get_num_new_matched_tokens(request, 2 * BLOCK) == (2 * BLOCK, True)


def test_hits_are_multiples_of_the_alignment():
    world = World(groups=Groups(BLOCK, 3 * BLOCK, ("full",), (BLOCK,), (0,), 0))
    prefix = tokens(8 * BLOCK)
    world.prefill(Request("a", prefix))
    assert world.connector.get_num_new_matched_tokens(Request("b", [*prefix, 1]), 0) == (6 * BLOCK, True)


def test_draft_layers_drop_the_end_of_a_hit():
    world = World(groups=Groups(BLOCK, BLOCK, ("full",), (BLOCK,), (0,), BLOCK))
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    assert world.connector.get_num_new_matched_tokens(Request("b", [*prefix, 1]), 0) == (3 * BLOCK, True)
    assert world.connector.get_num_new_matched_tokens(Request("c", [*prefix[:BLOCK], 1]), 0) == (0, False)


def test_disk_is_waited_for_and_counted():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    request = Request("b", [*prefix, 1])
    for _ in range(5):
        assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    world.session.promote()
    for _ in range(5):
        assert world.connector.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    world.admit(request, external=4 * BLOCK)
    sources = world.connector.get_external_cache_hit_sources(request, 4 * BLOCK)
    assert {source.value: count for source, count in sources.items()} == {"disk": 4 * BLOCK}
    world.answer(world.step())
    request.num_computed_tokens = 4 * BLOCK
    world.step([(request, 1)])
    data = world.counts.collect()
    assert data["counters"]["lookups_disk"] == 1
    assert data["counters"]["lookups_miss"] == 1
    assert data["counters"]["hit_tokens_disk"] == 4 * BLOCK
    assert len(data["samples"]["lookup_seconds"]) == 2
    assert len(data["samples"]["wait_seconds"]) == 1


def test_endless_wait_is_given_up(monkeypatch):
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    request = Request("b", [*prefix, 1])
    now = [0.0]
    monkeypatch.setattr(lookups, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    now[0] = lookups.LOOKUP_DEADLINE_S + 1
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    world.session.promote()
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert world.counts.collect()["counters"]["lookups_timed_out"] == 1


def test_failed_load_is_remembered():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", [*prefix, 1])
    assert world.connector.get_num_new_matched_tokens(request, 0)[0]
    world.admit(request, external=4 * BLOCK)
    meta = world.step()
    world.answer(meta, failed_loads={"b"})
    assert ("end_transfer", meta.loads[0].transfer_id, False) in world.session.calls
    # After "later" vLLM queues the request among those that hold no device blocks.
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert world.connector.get_num_new_matched_tokens(Request("c", [*prefix, 1]), 0)[0] == 4 * BLOCK
    assert world.counts.collect()["counters"]["failed_loads"] == 1


def test_load_that_cannot_begin_is_reported_by_the_workers():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", [*prefix, 1])
    world.connector.get_num_new_matched_tokens(request, 0)
    world.session.gone.add("b")
    world.admit(request, external=4 * BLOCK)
    assert world.connector.has_pending_push_work()
    meta = world.step()
    assert meta.failed_loads == ["b"]
    assert meta.loads == []
    world.answer(meta)
    assert not world.connector.has_pending_push_work()
    assert world.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_error_while_a_load_begins_still_ends_the_load(monkeypatch):
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", [*prefix, 1])
    world.connector.get_num_new_matched_tokens(request, 0)

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(world.session, "begin_load", broken)
    with pytest.raises(RuntimeError):
        world.admit(request, external=4 * BLOCK)
    assert world.step().failed_loads == ["b"]


def test_plan_that_leaves_a_block_unfilled_is_refused(monkeypatch):
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", [*prefix, 1])
    world.connector.get_num_new_matched_tokens(request, 0)
    begin = world.session.begin_load

    def short(*args):
        load = begin(*args)
        load.extents[0].offsets = load.extents[0].offsets[:-8]
        return load

    monkeypatch.setattr(world.session, "begin_load", short)
    world.admit(request, external=4 * BLOCK)
    meta = world.step()
    assert meta.failed_loads == ["b"]
    assert not world.session.loads


@pytest.mark.parametrize("part", ["computed", "scheduled"])
def test_an_error_in_the_times_of_steps_keeps_no_load_from_the_workers(part, monkeypatch):
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", [*prefix, 1])
    world.connector.get_num_new_matched_tokens(request, 0)
    monkeypatch.setattr(world.connector.steps, part, lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        world.admit(request, 4 * BLOCK)
    assert [job.request_id for job in world.step().loads] == ["b"]


def test_null_blocks_are_not_loaded_into():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", [*prefix, 1])
    world.connector.get_num_new_matched_tokens(request, 0)
    table = [0, 0, 40, 41, 42]
    world.connector.update_state_after_alloc(request, Blocks((table,)), 4 * BLOCK)
    (job,) = world.step().loads
    assert job.groups[0].block_ids.tolist() == [40, 41]
    assert job.groups[0].offsets.tolist() == [2 * SLOT, 3 * SLOT]


def test_null_blocks_are_never_saved():
    world = World()
    request = Request("a", tokens(2 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.tables["a"] = ([0, 9],)
    assert not world.step([(request, 2 * BLOCK)]).saves
    assert len(world.errors) == 1
    assert not world.session.reserved
    assert all(block.ref_cnt == 0 for block in world.pool.blocks)


def test_error_in_one_save_keeps_the_rest_of_the_step():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    loading, bad, good = Request("b", [*prefix, 1]), Request("c", tokens(BLOCK, 1)), Request("d", tokens(BLOCK, 2))
    world.connector.get_num_new_matched_tokens(loading, 0)
    world.admit(loading, external=4 * BLOCK)
    for request in (bad, good):
        world.connector.get_num_new_matched_tokens(request, 0)
        world.admit(request)
    world.tables["c"] = ([],)
    meta = world.step([(bad, BLOCK), (good, BLOCK)])
    assert [job.request_id for job in meta.loads] == ["b"]
    assert [job.request_id for job in meta.saves] == ["d"]
    assert [hook for hook, _ in world.errors] == ["build_connector_meta"]


def test_abort_while_loading_saves_nothing_and_ends_the_load():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.host.pop((0, Request("x", prefix).block_hashes[-1]))
    request = Request("b", [*prefix, 1])
    assert world.connector.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)
    world.admit(request, external=3 * BLOCK)
    meta = world.step()
    # vLLM counts the hit as computed from the start.
    request.num_computed_tokens = 4 * BLOCK
    world.connector.request_finished(request, world.tables["b"])
    assert world.step().saves == []
    assert world.connector.has_pending_push_work()
    world.answer(meta)
    assert ("end_transfer", meta.loads[0].transfer_id, True) in world.session.calls
    assert not world.connector.has_pending_push_work()
    assert world.connector.idle() is False  # "a" still runs


def test_abort_while_waiting_drops_the_lookup():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    request = Request("b", [*prefix, 1])
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.connector.request_finished(request, ([],))
    assert "b" not in world.session.lookups


def test_preempted_request_finds_its_generated_tokens():
    world = World()
    request = Request("a", tokens(2 * BLOCK))
    world.prefill(request)
    world.tables["a"] = (world.tables["a"][0] + world.pool.allocate(1),)
    for token in range(BLOCK + 2):
        request.append(token)
        world.answer(world.step([(request, 1)]))
    world.pool.free_ids(world.tables["a"][0])
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert world.connector.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)


def test_refused_save_is_tried_again_and_at_the_end():
    world = World(capacity=1)
    request = Request("a", tokens(3 * BLOCK))
    world.prefill(request)
    assert len(world.session.host) == 1
    world.engine.capacity = 2
    saves = 0
    for token in range(due_saves._RETRY_STEPS + 1):
        request.append(token)
        meta = world.step([(request, 1)])
        saves += len(meta.saves)
        world.answer(meta)
    assert saves == 1
    assert len(world.session.host) == 2
    world.engine.capacity = 3
    world.finish(request)
    world.answer(world.step())
    assert len(world.session.host) == 3


def test_refused_saves_come_back_one_after_the_other_and_ever_less_often():
    world = World(capacity=0)
    requests = [Request(name, tokens(2 * BLOCK, seed=seed)) for seed, name in enumerate("abcdefgh")]
    for request in requests:
        world.prefill(request)
    asked = world.session.calls
    steps = 4 * due_saves._RETRY_STEPS
    per_step = []
    for _ in range(steps):
        before = len([call for call in asked if call[0] == "begin_save"])
        world.answer(world.step([(request, 0) for request in requests]))
        per_step.append(len([call for call in asked if call[0] == "begin_save"]) - before)
    # At first all within eight steps, and never all in one.
    assert sum(per_step[: due_saves._RETRY_STEPS + 1]) >= len(requests)
    assert max(per_step) <= len(requests) // 2
    assert sum(per_step) < len(requests) * steps // due_saves._RETRY_STEPS


def test_lookup_starts_at_arrival_unless_switched_off_or_incomplete():
    world = World()
    world.connector.on_new_request(Request("a", tokens(2 * BLOCK)))
    world.connector.on_new_request(Request("streaming", tokens(2 * BLOCK), resumable=True))
    world.connector.on_new_request(Request("short", tokens(BLOCK - 1)))
    world.connector.on_new_request(Request("logprobs", tokens(2 * BLOCK), skip_reading_prefix_cache=True))
    assert [call for call in world.session.calls if call[0] == "prefetch"] == [("prefetch", "a", 0, 2 * BLOCK)]
    world = World(early_prefetch=False)
    world.connector.on_new_request(Request("a", tokens(BLOCK)))
    assert world.session.calls == []


def test_a_prefetch_leaves_out_the_device_blocks():
    world = World(disk_path="/cache")
    hit = ((), 2 * BLOCK, 0)
    coordinator = SimpleNamespace(find_longest_cache_hit=lambda hashes, limit: hit, single_type_managers=[None, None])
    world.connector.bind_kv_cache_manager(SimpleNamespace(enable_caching=True, coordinator=coordinator))
    world.connector.on_new_request(Request("a", tokens(5 * BLOCK)))
    assert world.session.calls == [("prefetch", "a", 2 * BLOCK, 5 * BLOCK)]


def test_request_that_must_not_read_the_cache_misses():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    request = Request("b", [*prefix, 1], skip_reading_prefix_cache=True)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_reset_keeps_blocks_of_before_it_out():
    world = World()
    request = Request("a", tokens(2 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    meta = world.step([(request, BLOCK)])
    assert world.connector.reset_cache() is True
    world.answer(meta)
    assert not world.session.host
    # The device still holds blocks that the old weights computed.
    assert not world.step([(request, BLOCK)]).saves
    world.finish(request)
    assert not world.step().saves
    world.prefill(Request("b", tokens(2 * BLOCK)))
    assert len(world.session.host) == 2


def test_prefix_cache_reset_is_not_held_up_by_saves():
    world = World()
    request = Request("a", tokens(2 * BLOCK))
    world.connector.on_new_request(request)
    world.connector.get_num_new_matched_tokens(request, 0)
    world.admit(request)
    meta = world.step([(request, 2 * BLOCK)])
    world.finish(request)
    assert world.pool.reset_prefix_cache() is True
    # Its source may have changed while it was copied.
    world.answer(meta)
    assert not world.session.host
    assert not world.session.reserved


def test_an_answer_asked_for_again_is_counted_once():
    world = World()
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    requests = [Request(f"r{index}", [*prefix, index]) for index in range(100)]
    for _ in range(3):
        for request in requests:
            assert world.connector.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    counters = world.counts.collect()["counters"]
    assert counters["lookups_host"] == 100


def test_two_groups_keep_their_own_blocks():
    groups = Groups(BLOCK, 2 * BLOCK, ("full", "full"), (BLOCK, 2 * BLOCK), (0, 0), 0)
    world = World(groups=groups)
    prefix = tokens(4 * BLOCK)
    first = Request("a", prefix)
    world.connector.on_new_request(first)
    world.connector.get_num_new_matched_tokens(first, 0)
    world.tables["a"] = ([1, 2, 3, 4], [11, 12])
    meta = world.step([(first, 4 * BLOCK)])
    saved = {copy.group: sorted(copy.block_ids.tolist()) for copy in meta.saves[0].groups}
    assert saved == {0: [1, 2, 3, 4], 1: [11, 12]}
    world.answer(meta)
    second = Request("b", [*prefix, 1])
    assert world.connector.get_num_new_matched_tokens(second, 2 * BLOCK) == (2 * BLOCK, True)
    world.connector.update_state_after_alloc(second, Blocks(([1, 2, 23, 24, 25], [11, 32, 33])), 2 * BLOCK)
    (job,) = world.step().loads
    assert {copy.group: copy.block_ids.tolist() for copy in job.groups} == {0: [23, 24], 1: [32]}


def test_close_ends_the_session():
    world = World()
    world.connector.close()
    assert world.session.closed
