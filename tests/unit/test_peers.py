"""`make compare-peers` without the peers: its table, what it says of wrong answers and missing hits, how it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peers import __main__ as command
from peers import systems
from peers.measure import COMPUTED, TOKENS
from peers.systems import DEVICE, DISK, HOST, RESTART, SYSTEMS, System
from peers.table import spread, table, wrong

SLOW, FAST = 600.0, 20.0


def measured(name: str, number: int = 1, **changes: Any) -> dict[str, Any]:
    """A round in which everything is as the system claims. ``changes``: of single phases."""
    [system] = [one for one in SYSTEMS if one.name == name]
    found: dict[str, Any] = {"system": name, "round": number, "versions": {"vLLM": "0.32"}}
    for phase in (COMPUTED, DEVICE, HOST, DISK, RESTART):
        hit = phase in system.tiers
        ms = FAST if hit else SLOW
        found[phase] = {
            "ms": [ms, ms],
            "median_ms": ms,
            "answers": {"0": [7, 8], "1": [9, 9]},
            "cached": [TOKENS if hit else 0] * 2,
            "from_disk": 1.0 if hit and phase in (DISK, RESTART) else 0.0,
        }
    for load in ("new", "turns"):
        found[load] = {"each_s": 0.5, "processor_s": 0.4, "answers": {f"{load} 0": [1]}}
    return found | {phase: found[phase] | change for phase, change in changes.items()}


def test_a_place_that_a_system_does_not_claim_is_in_parentheses() -> None:
    rows = table([measured("offloading"), measured("embedded")])
    assert rows[2:] == [
        "| vLLM's offloading, host memory | 600, 20, 20, (600), (600) | 2, 2 | 0.4, 0.4 |",
        "| undercroft embedded | 600, 20, 20, 20, 20 | 2, 2 | 0.4, 0.4 |",
    ]


def test_a_system_that_did_not_run_is_a_row_with_the_reason() -> None:
    [row] = table([{"system": "lmcache", "round": 1, "failed": "not installed: no such package"}])[2:]
    assert row == "| LMCache, server process | did not run: not installed: no such package | | |"


def test_a_hit_that_a_peer_misses_is_in_its_row() -> None:
    [row] = table([measured("lmcache", disk={"cached": [TOKENS, 0]})])[2:]
    assert row.startswith("| LMCache, server process | 600, 20, 20, 20 [1 of 2 hit], 20 |")


def test_a_row_names_the_version_of_the_peer() -> None:
    one = measured("lmcache") | {"versions": {"vLLM": "0.32", "LMCache": "0.5.6"}}
    assert table([one])[2].startswith("| LMCache, server process 0.5.6 |")


def test_the_spread_is_that_of_the_worst_place() -> None:
    rounds = [measured("embedded"), measured("embedded", 2, disk={"median_ms": 30.0})]
    assert spread(rounds).endswith("at most by 50% (undercroft embedded, on disk)")
    assert spread(rounds[:1]) == "one round: no spread"


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        pytest.param("files", {DISK: {"answers": {"1": [9, 8]}}}, "prompt 1: [9, 8], but [9, 9] of vllm", id="answer"),
        pytest.param("files", {"turns": {"answers": {"turns 0": [2]}}}, "turns 0: [2]", id="answer of a turn"),
        pytest.param("served", {HOST: {"cached": [TOKENS, 64]}}, f"64 of {TOKENS} tokens", id="hit of a part"),
        pytest.param("served", {DISK: {"cached": [TOKENS, TOKENS - 32]}}, "", id="hit of nearly all"),
        pytest.param("files", {HOST: {"cached": [TOKENS, 64]}}, "", id="hit of a part, of a peer"),
        pytest.param("embedded", {HOST: {"from_disk": 0.5}}, "50% of the KV cache were read", id="not from memory"),
        pytest.param("embedded", {RESTART: {"from_disk": 0.5}}, "only 50% of the KV cache", id="not from the disk"),
        pytest.param("vllm", {COMPUTED: {"cached": [0, 32]}}, "32 tokens of a new prompt", id="cold prompt that hits"),
        pytest.param("offloading", {DISK: {"cached": [32, 0]}}, "", id="place that it does not claim"),
    ],
)
def test_what_is_wrong_is_said(name: str, changes: dict[str, Any], expected: str) -> None:
    found = [one.what for one in wrong([measured(name, **changes), measured("vllm" if name != "vllm" else "files")])]
    assert len(found) == (1 if expected else 0)
    assert all(expected in one for one in found)


def results(path: Path, *rounds: dict[str, Any]) -> Path:
    first = {"system": "", "round": 0, "commit": "c0ffee", "machine": "one", "date": "2026-11-27"}
    path.write_text("".join(json.dumps(one) + "\n" for one in (first, *rounds)))
    return path


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> int:
    monkeypatch.setattr(command, "commit", lambda: "c0ffee")
    monkeypatch.setattr("sys.argv", ["peers", "--results", str(path), *arguments])
    return command.main()


def test_a_wrong_token_ends_the_run_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [measured(system.name) for system in SYSTEMS]
    assert run(monkeypatch, results(tmp_path / "right", *rounds), "--rounds", "1") == 0
    rounds[3] = measured("lmcache", restart={"answers": {"0": [7, 7]}})
    assert run(monkeypatch, results(tmp_path / "wrong", *rounds), "--rounds", "1") == 1
    printed = capsys.readouterr()
    assert "LMCache, server process: round 1, restart, prompt 0: [7, 7], but [7, 8] of vllm" in printed.err
    assert printed.out.count("| undercroft served |") == 2


def test_undercroft_that_does_not_run_is_an_error_and_a_peer_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = {"round": 1, "failed": "no memory"}
    for name, expected in (("served", 1), ("lmcache", 0)):
        path = results(tmp_path / name, failed | {"system": name})
        assert run(monkeypatch, path, "--rounds", "1", "--only", name) == expected


def test_a_run_goes_on_where_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def one_round(system: System, where: Path | None) -> dict[str, Any]:
        asked.append(system.name)
        return measured(system.name, 1)

    monkeypatch.setattr(command, "one_round", one_round)
    path, arguments = tmp_path / "results", ("--rounds", "2", "--only", "vllm,embedded")
    assert run(monkeypatch, path, *arguments, "--minutes", "0.5") == 0
    assert "4 are left" in capsys.readouterr().err
    assert run(monkeypatch, path, *arguments[:1], "1", *arguments[2:]) == 0
    assert run(monkeypatch, path, *arguments) == 0
    assert asked == ["vllm", "embedded", "embedded", "vllm"]
    monkeypatch.setattr(command, "commit", lambda: "another")
    with pytest.raises(SystemExit, match="results of commit c0ffee, and this is another: add --fresh"):
        command.read(path, fresh=False)


def test_an_unknown_system_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path / "results", "--only", "redis")
    assert ended.value.code == 2


def test_a_peer_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(systems, "ROOT", tmp_path)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    peer = System("peer", "A peer", (), environment="peer")
    (tmp_path / ".venv-peers/peer/bin").mkdir(parents=True)
    (tmp_path / ".venv-peers/peer.log").write_text("resolving\nno version of peer\n\n")
    assert command.one_round(peer, tmp_path) == {"failed": "not installed: no version of peer"}
    peer.python.write_text("#!/bin/sh\necho 'it needs a GPU' >&2\necho '  ^^^' >&2\nexit 3\n")
    peer.python.chmod(0o755)
    assert command.one_round(peer, tmp_path) == {"failed": "before the restart: it needs a GPU"}
