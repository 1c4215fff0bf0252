"""The planner's part of `undercroft status`."""

import pytest

from undercroft.cli import planning

STATS = {
    "plan_disk_bytes_per_s": 3_100_000_000,
    "plan_disk_latency_seconds": 0.0005,
    "plan_copy_bytes_per_s": 25_000_000_000,
    "plan_copy_latency_seconds": 0.002,
    "plan_prefill_tokens_per_s": 34_000,
    "plan_prefill_tokens_per_s_32k": 20_000,
    "plan_bytes_per_token": 131_072,
}


def test_time_of_computing_grows_with_the_position():
    assert planning.compute_s(STATS, 34) == pytest.approx(0.001, rel=0.01)
    # A prompt of 32,768 tokens is computed at the mean of the times of its first and its last token.
    mean = (1 / 34_000 + 1 / 20_000) / 2
    assert planning.compute_s(STATS, 32768) == pytest.approx(32768 * mean, rel=0.001)


def test_one_sentence_names_the_length_from_which_the_disk_is_read():
    slow = planning.sentence(STATS)
    assert slow.startswith("disk 2.887 GiB/s; this model breaks even at 3.816 GiB/s for 8192 tokens: ")
    assert slow.endswith("prefixes of 131072 tokens and more are loaded")
    fast = planning.sentence(STATS | {"plan_disk_bytes_per_s": 14_000_000_000})
    assert fast.endswith("prefixes of 512 tokens and more are loaded")
    none = planning.sentence(STATS | {"plan_disk_bytes_per_s": 100_000_000})
    assert none.endswith("prefixes on the disk are computed")


def test_the_remote_store_has_a_sentence_and_a_table_of_its_own():
    assert [tier for tier, _, _ in planning.of_tiers(STATS)] == ["disk"]
    remote = {"plan_remote_bytes_per_s": 1_000_000_000, "plan_remote_latency_seconds": 0.02}
    _, (tier, text, stats) = planning.of_tiers(STATS | remote)
    assert (tier, text.split(";")[0]) == ("remote store", "remote store 953.7 MiB/s")
    assert text.endswith("prefixes on the remote store are computed")
    assert [row[-1] for row in planning.table(stats)] == ["compute"] * 5
    # The disk of the same engine is another matter.
    assert [row[-1] for row in planning.table(STATS | remote)][-1] == "load"
    only = {"plan_disk_bytes_per_s": 0, "plan_remote_bytes_per_s": 20_000_000_000}
    ((tier, text, _),) = planning.of_tiers(STATS | only)
    assert tier == "remote store" and text.endswith("tokens and more are loaded")


def test_nothing_is_said_before_enough_was_measured():
    assert planning.sentence(STATS | {"plan_prefill_tokens_per_s": 0}) == ""
    assert planning.sentence({}) == ""


def test_the_table_has_a_row_for_each_length():
    rows = planning.table(STATS)
    assert [row[0] for row in rows] == [str(tokens) for tokens in planning.LENGTHS]
    assert [row[-1] for row in rows] == ["compute"] * 4 + ["load"]


@pytest.fixture
def running(monkeypatch):
    """The engines that run, of which the last has measured enough."""
    found = [
        {"pid": 1, "info": {}, "stats": {}},
        {"pid": 2, "info": {"disks": [{}]}, "stats": {}},
        {"pid": 3, "info": {"disks": [{}]}, "stats": dict(STATS)},
    ]
    monkeypatch.setattr(planning.engines, "all_of_user", lambda: found)
    return found


def test_doctor_shows_the_plan_of_each_engine_with_a_disk(running, capsys):
    from undercroft.cli import doctor
    from undercroft.cli.doctor import plans

    early, known = plans.checks()
    assert (early.name, early.status, early.plan) == ("plan of the engine in process 2", "ok", None)
    assert (known.name, known.status, known.found) == (
        "plan of the engine in process 3",
        "ok",
        planning.sentence(STATS),
    )
    doctor._print(known)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["prompt", "tokens", "computing"]
    assert lines[-1].split()[0] == "131072" and lines[-1].endswith("load")
    running[2]["stats"]["plan_remote_bytes_per_s"] = 100_000_000
    _, _, remote = plans.checks()
    assert (remote.name, remote.status) == ("plan of the engine in process 3", "warn") and "store" in remote.advice
    del running[2]["stats"]["plan_remote_bytes_per_s"]
    running[2]["stats"]["plan_disk_bytes_per_s"] = 100_000_000
    _, slow = plans.checks()
    assert (slow.status, [row[-1] for row in slow.plan]) == ("warn", ["compute"] * 5)


def test_bench_weighs_the_disk_that_it_measured_against_the_model_that_runs(running):
    rows = planning.of_running()
    assert [row["decision"] for row in rows] == ["compute"] * 4 + ["load"]
    assert [row["decision"] for row in planning.of_running(14e9)] == ["load"] * 5
    del running[2]
    assert planning.of_running(14e9) == []
