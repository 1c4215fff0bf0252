from __future__ import annotations

import pickle
from types import SimpleNamespace

from undercroft.connector.observe.stats import (
    COUNTERS,
    GAUGES,
    SAMPLES,
    STATS_KEYS,
    Counts,
    EngineStats,
    UndercroftStats,
)
from undercroft.hours import LOOKUPS
from undercroft.metrics import METRICS


def latency(reads=0, seconds=0.0):
    """The times of a directory, as in `Engine.info`: reads of 2 ms, counted by limits of 1 ms and 10 ms."""
    none = {"at_most": [0, 0, 0], "seconds": 0.0}
    return {"limits_s": [0.001, 0.01], "load": {"at_most": [0, reads, reads], "seconds": seconds}, "save": none}


class Engine:
    def __init__(self):
        self.values = {"saved_blocks": 0, "host_used_bytes": 0, "host_capacity_bytes": 1000, "disk_read_seconds": 0.0}
        self.reads = 0

    def stats(self):
        self.reads += 1
        return dict(self.values)

    is_shared = False
    took_over = False
    arena = SimpleNamespace(socket="/run/engine.sock")

    def connection(self):
        return ("up", "")

    disks = ({"path": "/cache", "health": "good", "latency": latency()},)

    def info(self):
        return {"io_engine": "io_uring", "disks": list(self.disks)}


def test_engine_counters_become_differences_at_most_once_a_second():
    engine = Engine()
    stats = EngineStats(engine)
    first = stats.collect(100.0)
    assert first["counters"] == {}
    assert first["socket"] == "/run/engine.sock"
    assert first["gauges"] == {"host_used_bytes": 0, "host_capacity_bytes": 1000}
    engine.values.update(saved_blocks=5, host_used_bytes=50, disk_read_seconds=0.25)
    assert stats.collect(100.5) == {}
    assert engine.reads == 1
    assert stats.collect(100.6, force=True)["counters"] == {"saved_blocks": 5, "disk_read_seconds": 0.25}
    engine.values.update(saved_blocks=7)
    assert stats.collect(101.7)["counters"] == {"saved_blocks": 2}


def test_an_io_engine_is_named_only_with_a_disk_tier():
    engine = Engine()
    assert EngineStats(engine).collect(100.0)["io_engine"] == "io_uring"
    engine.disks = ()
    assert not EngineStats(engine).collect(100.0)["io_engine"]


def test_times_of_disk_operations_become_differences_and_are_added_up():
    engine = Engine()
    stats = EngineStats(engine)
    assert stats.collect(100.0)["disks"] == ["/cache"]
    engine.disks = ({"path": "/a", "latency": latency(3, 0.5)}, {"path": "/b", "latency": latency()})
    first = UndercroftStats(stats.collect(102.0))
    assert first.data["disks"] == ["/a", "/b"]
    assert first.data["disk_times"] == {"0 load": [0, 3, 3, 0.5]}
    engine.disks = ({"path": "/a", "latency": latency(4, 0.75)}, {"path": "/b", "latency": latency(1, 2.0)})
    second = UndercroftStats(stats.collect(104.0))
    assert second.data["disk_times"] == {"0 load": [0, 1, 1, 0.25], "1 load": [0, 1, 1, 2.0]}
    both = first.aggregate(second).aggregate(UndercroftStats({"counters": {"saves_done": 1}}))
    assert both.data["disk_times"] == {"0 load": [0, 4, 4, 0.75], "1 load": [0, 1, 1, 2.0]}
    assert both.data["disks"] == ["/a", "/b"]
    assert stats.collect(106.0)["disk_times"] == {}
    # An engine that begins anew.
    engine.disks = ({"path": "/a", "latency": latency(2, 0.125)},)
    assert stats.collect(108.0)["disk_times"] == {"0 load": [0, 2, 2, 0.125]}


def test_collections_are_added_up_and_empty_ones_left_out():
    first, second = {"counters": {"saved_blocks": 1}, "gauges": {"nodes": 3}}, {"counters": {"saved_blocks": 2}}
    both = UndercroftStats.of({}, first, {}, second)
    assert both.data == {"counters": {"saved_blocks": 3}, "gauges": {"nodes": 3}}
    assert first["counters"] == {"saved_blocks": 1}
    assert UndercroftStats.of({}, {}).is_empty()


def test_a_counter_that_restarted_at_zero_counts_its_present_value():
    engine = Engine()
    stats = EngineStats(engine)
    engine.values.update(saved_blocks=9, disk_read_seconds=2.0)
    assert stats.collect(100.0)["counters"] == {"saved_blocks": 9, "disk_read_seconds": 2.0}
    engine.values.update(saved_blocks=4, disk_read_seconds=0.0)
    assert stats.collect(102.0)["counters"] == {"saved_blocks": 4}
    engine.values.update(saved_blocks=6)
    assert stats.collect(104.0)["counters"] == {"saved_blocks": 2}


def test_an_engine_that_has_not_answered_yet_counts_nothing_and_nothing_twice():
    engine = Engine()
    stats = EngineStats(engine)
    engine.values.update(saved_blocks=9)
    assert stats.collect(100.0)["counters"] == {"saved_blocks": 9}
    known, engine.values = engine.values, {}
    assert stats.collect(102.0) == {}
    engine.values = known
    assert stats.collect(104.0)["counters"] == {}


def test_capacity_is_also_reported_in_tokens():
    engine = Engine()
    engine.values.update(host_capacity_bytes=4096, disk_capacity_bytes=0)
    gauges = EngineStats(engine, tokens_in=lambda size: size // 16).collect(100.0)["gauges"]
    assert gauges["host_capacity_tokens"] == 256
    assert "disk_capacity_tokens" not in gauges


def test_counts_are_handed_out_once():
    counts = Counts()
    counts.lookup(0.5, "disk", waited=True)
    counts.lookup(0.1, "host", waited=False)
    counts.lookup(0.1, "miss", waited=False)
    counts.add("hit_tokens_host", 0)
    assert counts.collect() == {
        "counters": {"lookups_disk": 1, "lookups_host": 1, "lookups_miss": 1},
        "samples": {"lookup_seconds": [0.5, 0.1, 0.1], "wait_seconds": [0.5]},
    }
    assert counts.collect() == {}


def test_aggregation_adds_counters_appends_samples_and_keeps_the_latest_gauges():
    samples = {"lookup_seconds": [1.0]}
    one = UndercroftStats({"counters": {"load_bytes": 5}, "samples": samples, "io_engine": "io_uring"})
    two = UndercroftStats(
        {
            "counters": {"load_bytes": 7, "save_bytes": 1},
            "samples": {"lookup_seconds": [2.0]},
            "gauges": {"active_lookups": 3},
        }
    )
    both = pickle.loads(pickle.dumps(one)).aggregate(two)
    assert both.data == {
        "counters": {"load_bytes": 12, "save_bytes": 1},
        "samples": {"lookup_seconds": [1.0, 2.0]},
        "gauges": {"active_lookups": 3},
        "io_engine": "io_uring",
    }
    assert one.data["samples"] == {"lookup_seconds": [1.0]}
    assert UndercroftStats().is_empty()
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_the_log_line_is_short_and_shows_failures():
    stats = UndercroftStats(
        {
            "counters": {"lookups_host": 3, "lookups_miss": 1, "hit_tokens_host": 300, "checksum_failures": 2},
            "gauges": {"host_capacity_bytes": 1000, "host_used_bytes": 250},
        }
    )
    line = stats.reduce()
    assert line["undercroft lookups"] == 4
    assert line["hit tokens"] == 300
    assert line["host used %"] == 25.0
    assert line["checksum failures"] == 2
    assert "hook errors" not in line


def test_every_statistic_has_at_most_one_metric_and_every_metric_a_statistic():
    sources = [key for metric in METRICS for key in metric.sources]
    assert len(sources) == len(set(sources))
    assert set(sources) <= COUNTERS | GAUGES | set(SAMPLES)
    for metric in METRICS:
        kinds = {"counter": COUNTERS, "gauge": GAUGES, "histogram": set(SAMPLES)}
        assert set(metric.sources) <= kinds[metric.kind], metric.name
        assert all(len(labels) == len(metric.labels) for labels in metric.sources.values())
    # Only internal counts of the engine are not exported.
    internal = {
        "nodes",
        "namespaces",
        "sessions",
        "sessions_opened",
        "active_lookups",
        "loads",
        "saves",
        "load_failures",
        *LOOKUPS,
    }
    assert set(STATS_KEYS) - set(sources) == internal
