"""One cache for every number of ranks: what one rank saves, several load, and the other way around."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from connector_engine import BLOCK, LONG, OTHER, core, settled
from hybrid_engine import Model
from real_engine import Engine, Generation, prompt
from served_client import until
from test_engine_with_server import PATIENT, at_rest
from test_remote import until as until_stats
from tiny_models import Shape, make_llama
from undercroft import _core
from undercroft.log import logger

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Start = Callable[..., Engine]
HELD = len(LONG) // BLOCK * BLOCK


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an engine of a model with so many ranks, on the test's one directory."""
    # vLLM reads this once while any engine lives, and takes as many places as there are ranks.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join("01" * 4))
    started: list[Engine] = []

    def start(model: Path, ranks: int, options: dict[str, Any] | None = None, **arguments: Any) -> Engine:
        sizes = {"max_model_len": 2048, "blocks": 64, **arguments}
        if ranks > 1:
            sizes |= {"executor": "mp", "tensor_parallel_size": ranks}
        started.append(Engine(model, options or on_disk(tmp_path), **sizes))
        return started[-1]

    yield start
    for running in started:
        running.close()


def on_disk(directory: Path) -> dict[str, Any]:
    return {"host_memory": "64MiB", "disk_path": str(directory / "cache"), "disk_capacity": "128MiB"}


def answers(running: Engine, *prompts: list[int]) -> list[Generation]:
    """The answers to prompts, one after the other, all of whose blocks are then on disk."""
    found = []
    for ids in prompts:
        found.append(running.generate(ids, 16, logprobs=5))
        settled(running)
    assert core(running).flush(30.0)
    assert core(running).stats()["checksum_failures"] == 0
    return found


def pages(running: Engine) -> list[np.ndarray]:
    """Of each layer, the blocks of the first prompt on the device; the pool gives out blocks from 1 on."""
    caches = running.core.model_executor.driver_worker.worker.model_runner.kv_caches
    return [cache[1 : 1 + HELD // BLOCK].clone().view(torch.float32).numpy() for cache in caches]


@pytest.fixture(scope="module")
def heads_1(model_root: Path) -> Path:
    """A model with one head of keys and values, which every rank holds."""
    return make_llama(model_root / "llama_one_head", Shape(kv_heads=1))


@pytest.fixture(scope="module")
def heads_2(llama: Path) -> Path:
    return llama


@pytest.fixture(scope="module")
def heads_8(model_root: Path) -> Path:
    return make_llama(model_root / "llama_eight_heads", Shape(heads=8, kv_heads=8, head_dim=32))


@pytest.mark.parametrize("name", ["heads_1", "heads_2", "heads_8", "gemma2"])
def test_one_rank_and_two_ranks_load_blocks_of_each_other(
    start: Start, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory = request.getfixturevalue(name)
    same = Model(name, directory, "float32", BLOCK, 0).same
    more = LONG + prompt(4 * BLOCK, 7)

    one = start(directory, 1)
    [computed] = answers(one, LONG)
    assert computed.cached == 0
    one.close()

    two = start(directory, 2)
    loaded, other, longer = answers(two, LONG, OTHER, more)
    assert loaded.cached == HELD
    assert same(loaded, computed)
    # A window keeps no blocks in the middle of a prompt.
    assert other.cached == (0 if name == "gemma2" else 5 * BLOCK)
    assert core(two).stats()["disk_reads"] > 0
    two.close()

    one = start(directory, 1)
    again, other_again, longer_again = answers(one, LONG, OTHER, more)
    assert again.cached == HELD
    assert again.tokens == computed.tokens
    assert (other_again.cached, longer_again.cached) == (len(OTHER) // BLOCK * BLOCK, len(more) // BLOCK * BLOCK)
    assert same(other_again, other)
    assert same(longer_again, longer)
    [_] = _core.inspect(on_disk(tmp_path)["disk_path"])["namespaces"]


def test_four_and_eight_ranks_share_a_remote_store_with_one(start: Start, heads_8: Path, tmp_path: Path) -> None:
    """They have nothing else in common: each engine's memory ends with it, and none has a disk."""
    options = {"host_memory": "64MiB", "remote": f"file://{tmp_path}/remote", "remote_object": "1MiB"}
    same = Model("llama", heads_8, "float32", BLOCK, 0).same
    known: dict[int, Generation] = {}
    for ranks in (1, 4, 8, 1):
        running = start(heads_8, ranks, options)
        stored = list(known)
        for seed in (*stored, ranks):
            # Whole blocks and a token.
            answer = running.generate(prompt(4 * BLOCK + 1, seed), 16, logprobs=5)
            assert answer.cached == (4 * BLOCK if seed in known else 0), (ranks, seed)
            assert same(answer, known.setdefault(seed, answer)), (ranks, seed)
            settled(running)
        stats = core(running).stats()
        assert (stats["remote_hit_tokens"], stats["remote_corrupt"]) == (len(stored) * 4 * BLOCK, 0)
        until_stats(running, lambda stats: stats["remote_put_queue_segments"] == 0)
        assert (core(running).stats()["remote_puts"] > 0) == (ranks not in stored), ranks
        running.close()


def test_two_ranks_save_the_bytes_of_one(start: Start, heads_8: Path, tmp_path: Path) -> None:
    one = start(heads_8, 1, {"host_memory": "64MiB"})
    one.generate(LONG, 1)
    computed = pages(one)
    one.close()

    two = start(heads_8, 2)
    answers(two, LONG)
    two.close()

    one = start(heads_8, 1)
    assert one.generate(LONG, 1).cached == HELD
    loaded = pages(one)
    assert len(loaded) == Shape().layers
    # Ranks add up their parts of each layer's output, which rounds; the first layer's input is no such sum.
    assert (loaded[0] == computed[0]).all()
    for layer, (ours, theirs) in enumerate(zip(computed, loaded, strict=True)):
        np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-3, err_msg=f"layer {layer}")


def test_a_block_with_a_flipped_byte_is_computed_by_another_number_of_ranks(
    start: Start, heads_2: Path, tmp_path: Path
) -> None:
    one = start(heads_2, 1)
    [computed] = answers(one, LONG)
    one.close()
    data = Path(on_disk(tmp_path)["disk_path"], "data")
    content = bytearray(data.read_bytes())
    [namespace] = _core.inspect(str(data.parent))["namespaces"]
    for at in payloads(content, namespace["bytes"] // (HELD // BLOCK)):
        content[at] ^= 0x10
    data.write_bytes(content)

    two = start(heads_2, 2)
    answer = two.generate(LONG, 16, logprobs=5)
    assert answer.cached == 0
    assert Model("llama", heads_2, "float32", BLOCK, 0).same(answer, computed)
    assert core(two).stats()["checksum_failures"] > 0


def payloads(data: bytes, size: int) -> list[int]:
    """A byte in each piece of the file in which only payloads lie: none is smaller than a page of a disk."""
    return [at for at in range(size // 2, len(data), size) if any(data[at : at + 4096])]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """A server's engine in this process."""
    started = _core.Engine({"host_memory": 64 << 20, "socket": str(tmp_path / "run" / "serve.sock")})
    yield started
    started.close()


def through(server: Any) -> dict[str, Any]:
    return {"server": f"unix://{server.arena.socket}", **PATIENT}


def test_engines_of_one_rank_and_of_two_use_one_server_at_a_time(server: Any, start: Start, heads_8: Path) -> None:
    options = through(server)
    take_turns(start(heads_8, 2, options), start(heads_8, 1, options), server, heads_8)


def test_ranks_that_divide_the_experts_share_with_one_that_has_all(server: Any, start: Start, mixtral: Path) -> None:
    options, extended = through(server), {"worker_extension_cls": "cpu_experts.Experts"}
    two = start(mixtral, 2, options, enable_expert_parallel=True, **extended)
    one = start(mixtral, 1, options, **extended)
    held = [running.core.model_executor.collective_rpc("experts_held") for running in (two, one)]
    assert held == [[2, 2], [4]]
    take_turns(two, one, server, mixtral)


def take_turns(two: Engine, one: Engine, server: Any, model: Path) -> None:
    """Each computes two of four prompts, and loads those of the other."""
    same = Model("", model, "float32", BLOCK, 0).same
    for seed in range(20, 24):
        ids = prompt(4 * BLOCK + 1, seed)
        order = (one, two) if seed % 2 else (two, one)
        computed, loaded = (running.generate(ids, 16, logprobs=5) for running in settling(*order, server))
        assert (computed.cached, loaded.cached) == (0, 4 * BLOCK), seed
        assert same(computed, loaded), seed


def settling(first: Engine, second: Engine, server: Any) -> Iterator[Engine]:
    """Each engine, whose saves then end before the next is used."""
    for running in (first, second):
        yield running
        at_rest(running, server)


@pytest.mark.slow
def test_engines_of_one_four_and_eight_ranks_use_one_server_while_all_are_alive(
    server: Any, start: Start, heads_8: Path
) -> None:
    engines = {ranks: start(heads_8, ranks, through(server)) for ranks in (8, 4, 1)}
    computed = own_prompts(engines, server)
    prompts_of_others(engines, server, computed, heads_8)


@pytest.mark.slow
def test_engines_of_one_two_and_four_ranks_live_on_one_directory(start: Start, heads_8: Path, tmp_path: Path) -> None:
    engines = {ranks: start(heads_8, ranks, on_disk(tmp_path) | PATIENT) for ranks in (2, 4, 1)}
    assert [core(running).is_shared for running in engines.values()] == [False, True, True]
    owner = core(engines[2])
    computed = own_prompts(engines, owner)
    prompts_of_others(engines, owner, computed, heads_8)

    # The owner's host memory ends with it. Its vLLM stays: the end of its workers would break the engine of one rank.
    engines.pop(2)
    owner.close()
    left = [core(running) for running in engines.values()]
    until("one has taken over", lambda: any(engine.took_over for engine in left))
    until("both are attached", lambda: all(engine.connection()[0] == "up" for engine in left))
    [heir] = [engine for engine in left if engine.took_over]
    for running in engines.values():
        assert running.reset_device_cache()
    prompts_of_others(engines, heir, computed, heads_8)
    assert heir.stats()["disk_reads"] >= 4 * len(computed)
    [_] = _core.inspect(on_disk(tmp_path)["disk_path"])["namespaces"]


def own_prompts(engines: dict[int, Engine], owner: Any) -> dict[int, Generation]:
    """At a time, each engine computes a prompt of its own, whose blocks are then saved."""
    found = at_a_time(engines, owner, {ranks: [ranks] for ranks in engines})
    computed = {ranks: answer for ranks, [answer] in found.items()}
    assert [answer.cached for answer in computed.values()] == [0] * len(engines)
    return computed


def prompts_of_others(engines: dict[int, Engine], owner: Any, computed: dict[int, Generation], model: Path) -> None:
    """At a time, each engine loads the prompts of all others."""
    same = Model("", model, "float32", BLOCK, 0).same
    others = {ranks: [seed for seed in computed if seed != ranks] for ranks in engines}
    for ranks, loaded in at_a_time(engines, owner, others).items():
        for seed, answer in zip(others[ranks], loaded, strict=True):
            assert (answer.cached, same(answer, computed[seed])) == (4 * BLOCK, True), (ranks, seed)
    assert owner.stats()["checksum_failures"] == 0


def at_a_time(engines: dict[int, Engine], owner: Any, seeds: dict[int, list[int]]) -> dict[int, list[Generation]]:
    """The answers of all engines to their prompts, of whole blocks and a token; all is then saved."""

    def answered(ranks: int) -> list[Generation]:
        return [engines[ranks].generate(prompt(4 * BLOCK + 1, seed), 16, logprobs=5) for seed in seeds[ranks]]

    with ThreadPoolExecutor(len(engines)) as threads:
        found = dict(zip(engines, threads.map(answered, engines), strict=True))
    for running in engines.values():
        at_rest(running, owner)
    return found


def test_states_are_shared_with_as_many_ranks_only(
    start: Start, qwen3_next: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *values: said.append(text % values))
    ids = prompt(3 * 640 + 1)
    for ranks, cached in ((1, 0), (2, 0), (2, 3 * 640)):
        running = start(qwen3_next, ranks, dtype="bfloat16", max_model_len=4096, blocks=96)
        assert running.generate(ids, 1).cached == cached
        settled(running)
        assert core(running).flush(30.0)
        running.close()
    [reason, again] = [line for line in said if "tensor_parallel_size" in line]
    assert reason == again
    assert "tensor_parallel_size = 2 only: KV cache group 0 (MambaSpec) is not divided by the model's" in reason
