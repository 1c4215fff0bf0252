"""The hit threshold with undercroft's own cache behind it: blocks in host memory and on disk count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from real_engine import TRUSTING, Engine, prompt
from threshold_engine import FIFTH, HALF, WHOLE, limit, rejected
from undercroft import _core

pytestmark = pytest.mark.vllm

Start = Callable[..., Engine]
OTHER = prompt(897, seed=9)


@pytest.fixture
def start(engine: Start, llama: Path) -> Start:
    def start(blocks: int = 256, **options: Any) -> Engine:
        arguments = {"max_model_len": 2048, "blocks": blocks}
        arguments |= {key: options.pop(key) for key in ("enable_prefix_caching", "max_model_len") if key in options}
        memory = {} if "server" in options else {"host_memory": "128MiB"}
        return engine(llama, memory | options, **arguments)

    return start


@pytest.fixture(scope="module")
def plain(llama: Path) -> Iterator[dict[str, list[int]]]:
    """The tokens of a vLLM without any cache."""
    one = Engine(llama, enable_prefix_caching=False, max_model_len=2048, blocks=64)
    tokens = {name: one.generate(ids, 8).tokens for name, ids in (("whole", WHOLE), ("half", HALF))}
    one.close()
    return tokens


def settle(one: Engine, reset: bool = True) -> None:
    """Let the saves end, check that nothing is left, and empty the device's own cache."""
    one.idle_steps()
    assert one.scheduler.requests == {}
    assert not (one.scheduler.waiting or one.scheduler.deferred_waiting or one.scheduler.kv_holding_waiting)
    assert one.device_blocks_in_use() == 0
    stats = one.connector._engine.stats()
    assert (stats["loads"], stats["saves"], stats["active_lookups"]) == (0, 0, 0)
    assert stats["host_pinned_bytes"] == 0
    assert one.connector._threshold.collect() == []
    assert one.llm.llm_engine.output_processor.request_states == {}
    if reset:
        assert one.reset_device_cache()


def measured(result: Any) -> tuple[int, int, int]:
    assert rejected(result)
    answer = result.kv_transfer_params["cache_threshold"]
    return answer["local_tokens"], answer["external_tokens"], answer["required_tokens"]


def test_walk(plain: dict[str, list[int]], start: Start) -> None:
    one = start(cache_hit_threshold=0.8)
    assert one.generate(WHOLE, 8, params=limit(0)).tokens == plain["whole"]
    settle(one)
    assert measured(one.generate(FIFTH, 8, params=limit(0.33))) == (0, 128, 897)
    settle(one, reset=False)
    served = one.generate(HALF, 8, params=limit(0.33))
    assert (served.tokens, served.cached) == (plain["half"], 384)
    settle(one, reset=False)
    assert measured(one.generate(OTHER, 8)) == (0, 0, 897)
    # The device has three blocks of it by now, memory all.
    served = one.generate(WHOLE, 8)
    assert (served.tokens, served.cached) == (plain["whole"], 896)
    settle(one)
    one.generate(WHOLE[:385], 1, params=limit(0))
    settle(one, reset=False)
    assert measured(one.generate(WHOLE[:640] + OTHER[:257], 8)) == (384, 256, 897)
    settle(one)
    assert one.connector._threshold.rejections == {"request": 1, "global": 2}


@pytest.mark.parametrize("lookup", ["async", "blocking"])
@pytest.mark.parametrize("early_prefetch", [True, False])
def test_blocks_on_disk_count(
    plain: dict[str, list[int]], start: Start, tmp_path: Path, lookup: str, early_prefetch: bool
) -> None:
    options = {"disk_path": str(tmp_path), "disk_capacity": "128MiB", "lookup": lookup, "lookup_timeout_ms": 10_000}
    first = start(**options)
    first.generate(WHOLE, 2)
    settle(first)
    first.close()
    second = start(**options, early_prefetch=early_prefetch, cache_hit_threshold=0.4)
    assert measured(second.generate(FIFTH, 8)) == (0, 128, 897)
    settle(second)
    served = second.generate(HALF, 8)
    assert (served.tokens, served.cached) == (plain["half"], 384)
    settle(second)


@pytest.mark.parametrize("lookup", ["async", "blocking"])
@pytest.mark.parametrize("early_prefetch", [True, False])
def test_nothing_is_read_for_a_request_that_cannot_reach_its_threshold(
    plain: dict[str, list[int]], start: Start, tmp_path: Path, lookup: str, early_prefetch: bool
) -> None:
    options = {"disk_path": str(tmp_path), "disk_capacity": "128MiB", "lookup": lookup, "lookup_timeout_ms": 10_000}
    first = start(**options)
    first.generate(WHOLE, 2)
    settle(first)
    first.close()
    second = start(**options, early_prefetch=early_prefetch, cache_hit_threshold=0.5)
    stats = second.connector._engine.stats
    before = second.steps
    assert measured(second.generate(HALF, 8)) == (0, 384, 897)
    assert second.steps - before == 1
    assert (stats()["disk_reads"], stats()["host_used_bytes"]) == (0, 0)
    settle(second)
    # Once the device has a part, the rest is worth its reads.
    second.generate(HALF[:257], 1, params=limit(0))
    settle(second, reset=False)
    reads = stats()["disk_reads"]
    served = second.generate(HALF, 8, params=limit(0.42))
    assert (served.tokens, served.cached) == (plain["half"], 384)
    assert stats()["disk_reads"] - reads == 1
    settle(second)


def test_nothing_is_read_by_a_server_either(start: Start, tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "cache"), "capacity": 128 << 20}
    socket = str(tmp_path / "run" / "serve.sock")
    first = start(disk_path=disk["path"], disk_capacity="128MiB")
    first.generate(WHOLE, 2)
    settle(first)
    first.close()
    server = _core.Engine({"host_memory": 128 << 20, "socket": socket, "disks": [disk]})
    options = {"server": f"unix://{socket}", "server_timeout_ms": 30_000, "lookup_spin_us": 100_000}
    one = start(**options, cache_hit_threshold=0.5)
    assert measured(one.generate(HALF, 8)) == (0, 384, 897)
    assert server.stats()["disk_reads"] == 0
    one.close()
    server.close()


def test_prefix_caching_off(plain: dict[str, list[int]], start: Start) -> None:
    """undercroft is off then, and the threshold holds all the same: nothing is cached."""
    one = start(cache_hit_threshold=0.5, enable_prefix_caching=False)
    served = one.generate(WHOLE, 8, params=limit(0))
    assert (served.tokens, served.cached) == (plain["whole"], 0)
    assert measured(one.generate(WHOLE, 8)) == (0, 0, 897)
    one.idle_steps()
    assert one.device_blocks_in_use() == 0


def test_a_broken_cache_leaves_the_hits_of_the_device(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start()
    one.generate(WHOLE, 2)
    settle(one)
    one.generate(WHOLE[:257], 2)
    settle(one, reset=False)

    class Broken:
        """A session whose lookups fail."""

        def __init__(self, session: Any) -> None:
            self.session = session

        def lookup(self, *args: Any) -> None:
            raise RuntimeError("out of order")

        prefetch = lookup

        def __getattr__(self, name: str) -> Any:
            return getattr(self.session, name)

    lookups = one.connector._scheduler.lookups
    monkeypatch.setattr(lookups, "_session", Broken(lookups._session))
    assert measured(one.generate(WHOLE, 2, params=limit(0.5))) == (256, 0, 897)
    assert not rejected(one.generate(WHOLE, 2, params=limit(0.2)))
    monkeypatch.undo()
    settle(one)


def test_preempted_requests_that_find_their_blocks_are_served(start: Start) -> None:
    prompts = [[5 + (17 * i + 7 * j) % 990 for i in range(500)] for j in range(3)]
    one = start(blocks=13, max_model_len=1024)
    expected = [result.tokens for result in one.generate_all(prompts, 80)]
    settle(one)
    preempted: list[str] = []
    preempt = one.scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    one.scheduler._preempt_request = counted
    results = one.generate_all(prompts, 80, params=limit(0.001))
    assert preempted
    assert [result.tokens for result in results] == expected
    settle(one)


def test_inside_multi_connector(engine: Start, llama: Path, tmp_path: Path) -> None:
    other = {
        "kv_role": "kv_both",
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    ours = {
        "kv_role": "kv_both",
        "kv_connector": "UndercroftConnector",
        "kv_connector_extra_config": {"host_memory": "128MiB", "cache_hit_threshold": 0.6, **TRUSTING},
    }
    one = engine(llama, {"connectors": [ours, other]}, connector="MultiConnector", max_model_len=2048, blocks=64)
    assert rejected(one.generate(WHOLE, 4))
    one.generate(WHOLE, 4, params=limit(0))
    one.idle_steps()
    assert one.reset_device_cache()
    served = one.generate(WHOLE, 4)
    assert (served.finish_reason, served.cached) == ("length", 896)
    assert measured(one.generate(WHOLE[:385] + OTHER[:512], 4)) == (384, 0, 897)
    one.idle_steps()
    assert one.device_blocks_in_use() == 0


def test_five_hundred_mixed_requests_leave_nothing(start: Start) -> None:
    one = start()
    one.generate(WHOLE, 2)
    settle(one)
    prompts = [[HALF, FIFTH, WHOLE, prompt(300, seed=20 + i)][i % 4] for i in range(500)]
    results = one.generate_all(prompts, 2, params=limit(0.4))
    assert [rejected(result) for result in results] == [i % 4 in (1, 3) for i in range(500)]
    settle(one)


def test_zero_changes_neither_tokens_nor_steps(engine: Start, llama: Path, start: Start) -> None:
    """Against a vLLM without a connector, on prompts that share nothing: there is nothing to load."""
    prompts = [prompt(500, seed=seed) for seed in range(4)]

    def run(one: Engine) -> tuple[Any, int]:
        before = one.steps
        return [result.tokens for result in one.generate_all(prompts, 16)], one.steps - before

    without = engine(llama, max_model_len=2048, blocks=64)
    expected = run(without)
    without.close()
    one = start()
    assert run(one) == expected
    settle(one)
