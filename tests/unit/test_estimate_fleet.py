"""`undercroft estimate --hosts`: a fleet without payloads has about the hits of real engines with a real store."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from traces import generate

from core_values import PATIENCE_S, Group, granted
from undercroft import _core
from undercroft.cli import main
from undercroft.estimate.trace import Request, Trace, read

BLOCK_TOKENS = 512
# 512 bytes for each token: 256 KiB a block, and 4 blocks for an object of 1 MiB.
MODEL = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 1, "head_dim": 128}
BLOCK_BYTES = BLOCK_TOKENS * 512
HOST, DISK = 24 << 20, 32 << 20
SIZES = ["--host-memory", "24MiB", "--disk", "32MiB", "--remote-object", "1MiB"]
TIERS = ("host", "disk", "remote")


def estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: str) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert main.main(["estimate", "--model", str(tmp_path), "--block-size", "512", "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


class Host:
    """A real engine with payloads, a disk of its own, and a store that others share."""

    def __init__(self, tmp_path: Path, name: str) -> None:
        self.engine = _core.Engine(
            {
                "host_memory": HOST,
                "disks": [{"path": str(tmp_path / name), "capacity": DISK}],
                "remote": f"file://{tmp_path}/store",
                "remote_object": 1 << 20,
                "remote_write_rate": 0,
                "min_load_tokens": 0,
                "socket_dir": str(tmp_path / f"run-{name}"),
            }
        )
        self.session = self.engine.register("{}", [Group("full", BLOCK_TOKENS, BLOCK_BYTES)], BLOCK_TOKENS)
        self.numbers = itertools.count()

    def serve(self, request: Request) -> Counter[str]:
        """Tokens of the request's hit by tier."""
        name, session = str(next(self.numbers)), self.session
        hashes = [block.to_bytes(8, "little") * 4 for block in request.blocks]
        found = session.lookup(name, hashes, 0, request.prompt_blocks * BLOCK_TOKENS)
        while found.pending:
            assert session.wait(name, PATIENCE_S)
            found = session.lookup(name, hashes, 0, request.prompt_blocks * BLOCK_TOKENS)
        hits = Counter[str]()
        if found.tokens:
            load = session.begin_load(name, 0, found.tokens)
            assert load is not None
            session.end_transfer(load.transfer_id, True)
            hits = Counter(host=load.host_tokens, disk=load.disk_tokens, remote=load.remote_tokens)
        save = session.begin_save(name, hashes, len(hashes) * BLOCK_TOKENS)
        if save is not None and (save := granted(session, save)).extents:
            session.end_transfer(save.transfer_id, True)
        session.finish_request(name)
        return hits

    def written(self) -> None:
        """Wait until disk and store have everything."""
        assert self.engine.flush(PATIENCE_S)
        end = time.monotonic() + PATIENCE_S
        while self.engine.stats()["remote_put_queue_segments"]:
            assert time.monotonic() < end
            time.sleep(0.001)


def served(trace: Trace, route: list[int], tmp_path: Path) -> dict[str, float]:
    """The percentages of tokens that real engines find in each tier."""
    hosts = [Host(tmp_path, f"host-{number}") for number in range(2)]
    hits = Counter[str]()
    for host, request in zip(route, trace.requests, strict=True):
        hits += hosts[host].serve(request)
        # As with real engines, saved blocks are written between two requests.
        hosts[host].written()
    for one in hosts:
        one.engine.close()
    return {tier: 100 * hits[tier] / trace.tokens for tier in TIERS}


def made(tmp_path: Path, requests: int) -> Path:
    """A trace of agents: sessions with shared system prompts, which grow and come back."""
    events = itertools.islice((of for of in generate.trace("agents", seed=3, seconds=200) if of[1]), requests)
    lines = [
        json.dumps({"timestamp": int(1000 * at), "input_length": tokens, "hash_ids": blocks})
        for at, blocks, tokens in events
    ]
    path = tmp_path / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path


def routed(trace: Trace, router: str, hosts: int, **others: Any) -> list[int]:
    """The host of each request."""
    options: dict[str, Any] = {
        "parts": 1,
        "host_blocks": 64,
        "disk_blocks": 256,
        "second_touch": False,
        "disk_writes_per_s": 0.0,
        "store_objects": 0,
        "object_blocks": 1,
        "store_write": "all",
        "store_writes_per_s": 0.0,
    }
    fleet = _core.Fleet(hosts=hosts, router=router, **(options | others))
    start = trace.requests[0].time_s
    return [fleet.request(of.time_s - start, of.blocks[0], of.prompt_blocks, of.blocks)[0] for of in trace.requests]


@pytest.mark.parametrize("router", ["prefix", "random"])
def test_the_hits_are_those_of_two_real_engines_with_a_real_store(
    router: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = made(tmp_path, 120)
    arguments = ["--trace", str(path), *SIZES, "--remote", "64GiB", "--hosts", "2", "--router", router]
    found = estimate(capsys, tmp_path, *arguments, "--remote-write-rate", "0")
    assert (found["object_tokens"], found["cases"][0]["remote_hit_percent"]) == (2048, 0)
    trace = read(path)
    real = served(trace, routed(trace, router, 2), tmp_path)
    assert all(share > 1 for share in real.values()), real
    for tier in TIERS:
        assert found["cases"][1][f"{tier}_hit_percent"] == pytest.approx(real[tier], abs=2), tier


def test_the_fleet_says_whether_the_store_pays_and_how_many_hosts_it_carries(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--trace", str(made(tmp_path, 300)), *SIZES, "--remote", "1GiB", "--hosts", "4", "--router", "random"]
    limits = ["--store-requests", "1000", "--store-rate", "1GB"]
    found = estimate(capsys, tmp_path, *arguments, *limits)
    alone, case = found["cases"]
    assert (alone["remote"], alone["hosts_per_store"], alone["pays"], case["pays"]) == (0, None, None, None)
    assert case["added_hit_tokens"] == case["hit_tokens"] - alone["hit_tokens"] > 0
    loaded = case["remote_hit_tokens"] * 512
    assert case["remote_load_seconds"] > loaded / 3e9 + loaded / 20e9
    carried = min(4 * 1000 / case["remote_peak_requests_per_s"], 4 * 1e9 / case["remote_peak_bytes_per_s"])
    assert case["hosts_per_store"] == int(carried)
    assert case["remote_read_bytes"] >= loaded
    assert case["remote_requests"] == pytest.approx(case["remote_requests_per_s"] * found["seconds"])
    assert case["remote_peak_requests_per_s"] >= case["remote_requests_per_s"]
    even = case["break_even_prefill_rate"]
    for rate, pays in ((int(even / 2), True), (int(even * 2), False)):
        judged = estimate(capsys, tmp_path, *arguments, "--prefill-rate", str(rate))["cases"][1]
        assert judged["pays"] is pays
    for more, said in (
        ([], "A store of 1 GiB pays if a host computes less than"),
        (["--prefill-rate", str(int(even / 2))], "A store of 1 GiB pays: it adds "),
        (["--prefill-rate", str(int(even * 2))], "A store of 1 GiB does not pay: it adds "),
        (["--remote-write", "none"], "does not pay: it adds no hits"),
        (limits, f"this store carries {case['hosts_per_store']} hosts."),
        ([], "--store-requests and --store-rate tell how many hosts a store carries."),
    ):
        assert main.main(["estimate", "--model", str(tmp_path), "--block-size", "512", *arguments, *more]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "option",
    [("--disk-admission", "second_touch"), ("--remote-write", "second_touch")],
)
def test_the_hosts_have_the_options_of_the_engine(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--trace", str(made(tmp_path, 120)), *SIZES, "--remote", "1GiB", "--hosts", "2"]
    without, given = (estimate(capsys, tmp_path, *arguments, *more)["cases"] for more in ((), option))
    counts = ("hit_percent", "disk_write_bytes", "remote_write_bytes")
    assert any(without[1][name] != given[1][name] for name in counts)


def test_small_objects_cut_a_block_of_the_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An object of 1 MiB is two blocks of the trace, or an eighth of one."""
    path = made(tmp_path, 100)
    for width, tokens in ((128, 1024), (32 * 128, 64)):
        model = MODEL | {"hidden_size": width, "num_attention_heads": width // 128}
        (tmp_path / "config.json").write_text(json.dumps(model))
        sizes = ["--host-memory", "16GiB", "--remote", "64GiB", "--remote-object", "1MiB", "--hosts", "2"]
        assert main.main(["estimate", "--model", str(tmp_path), "--json", "--trace", str(path), *sizes]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["object_tokens"] == tokens
        assert found["object_bytes"] == pytest.approx(tokens * width * 4, rel=0.01)
        assert found["cases"][1]["hit_percent"] == pytest.approx(found["unlimited_hit_percent"], abs=2)


def test_prompts_that_begin_alike_are_one_session_and_the_host_is_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [json.dumps({"timestamp": 1000 * of, "input_length": 1024, "hash_ids": [0, of]}) for of in range(1, 101)]
    (tmp_path / "trace").write_text("\n".join(lines))
    arguments = ["--trace", str(tmp_path / "trace"), *SIZES, "--hosts", "8", "--router", "sticky"]
    case = estimate(capsys, tmp_path, *arguments)["cases"][0]
    assert case["busiest_host_percent"] == 100
    assert case["warnings"][-1] == "one host gets 100 % of the requests: the router does not spread this trace"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--router", "random"], "--router is for a fleet; give --hosts N"),
        (["--remote", "1TiB"], "--remote is for a fleet; give --hosts N"),
        (["--hosts", "2", "--store-rate", "1GB"], "--store-rate is about a remote store, and there is none"),
        (["--hosts", "2"], "all requests have the same timestamp, and a fleet needs times"),
        (["--hosts", "2", "--remote", "1KiB"], "--remote 1 KiB holds no object"),
    ],
)
def test_a_fleet_that_cannot_be_replayed_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    times = (0, 0) if said.startswith("all") else (0, 1000)
    lines = [json.dumps({"timestamp": at, "input_length": 512, "hash_ids": [1]}) for at in times]
    (tmp_path / "trace").write_text("\n".join(lines))
    argv = ["estimate", "--model", str(tmp_path), "--block-size", "512", "--trace", str(tmp_path / "trace"), *SIZES]
    assert main.main([*argv, *arguments]) == 2
    assert said in capsys.readouterr().err
