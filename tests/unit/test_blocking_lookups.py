"""Blocking lookups: they wait for the disk, and use the hit in host memory when their time is over."""

from __future__ import annotations

from fake_vllm import BLOCK, Request
from scheduler_world import World, tokens


def test_blocking_lookup_waits_for_the_disk():
    world = World(lookup="blocking", lookup_timeout_ms=40)
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    world.session.delivers = True
    request = Request("b", [*prefix, 1])
    assert world.connector.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    assert ("wait", "b", 0.04) in world.session.calls
    assert world.counts.collect()["counters"]["lookups_disk"] == 1


def test_blocking_lookup_that_runs_out_of_time_loads_nothing():
    world = World(lookup="blocking")
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    world.session.lower()
    request = Request("b", [*prefix, 1])
    world.counts.collect()
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    # It is asked again where no device blocks are free, and does not wait again.
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert [call[0] for call in world.session.calls].count("wait") == 1
    assert world.counts.collect()["counters"] == {"lookups_timed_out": 1}


def test_blocking_lookup_that_runs_out_of_time_loads_what_host_memory_has(caplog):
    world = World(lookup="blocking", lookup_timeout_ms=40)
    prefix = tokens(4 * BLOCK)
    world.prefill(Request("a", prefix))
    in_host = 3
    payloads = list(world.session.host)
    world.session.disk.update(payloads[in_host:])
    world.counts.collect()
    for name in ("b", "c"):
        request = Request(name, [*prefix, 1])
        assert world.connector.get_num_new_matched_tokens(request, 0) == (in_host * BLOCK, True)
    world.admit(request, external=in_host * BLOCK)
    world.answer(world.step())
    counters = world.counts.collect()["counters"]
    assert counters["lookups_timed_out"] == 2
    assert not {"lookups_miss", "lookups_host", "lookups_disk"} & counters.keys()
    assert [record.message for record in caplog.records] == [
        "undercroft: a blocking lookup reached lookup_timeout_ms (40): the hit ends with the part in host memory"
    ]
