"""Pipeline parallelism: a payload has the layers of both stages, and is the one that a single stage saves."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector_engine import BLOCK, LONG, OTHER, TOKENS, core, settled
from engine_checks import add, finish, step
from hybrid_engine import Model
from real_engine import Engine, Generation, prompt
from test_any_ranks import HELD, answers, on_disk, pages, payloads
from tiny_models import Shape, make_llama
from undercroft import _core

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Start = Callable[..., Engine]
PROMPTS = [LONG, OTHER, prompt(3 * BLOCK + 5, 8), prompt(70, 9)]
WARM: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}
"""On a CPU vLLM makes the buffers for the output of an earlier stage only if it compiles the model."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an engine of a model in so many stages, on the test's one directory unless ``options`` say otherwise."""
    started: list[Engine] = []

    def start(model: Path, stages: int, options: dict[str, Any] | None = None, **arguments: Any) -> Engine:
        ranks = stages * arguments.get("tensor_parallel_size", 1)
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(rank % 2) for rank in range(ranks)))
        sizes = {"max_model_len": 2048, "blocks": 64, **WARM, **arguments}
        if ranks > 1:
            sizes |= {"executor": "mp", "pipeline_parallel_size": stages}
        started.append(Engine(model, on_disk(tmp_path) if options is None else options, **sizes))
        return started[-1]

    yield start
    for running in started:
        running.close()


def alone(model: Path, dtype: str = "float32", **arguments: Any) -> list[Generation]:
    """The answers of a vLLM of one stage without any cache."""
    sizes = {"max_model_len": 2048, "blocks": 64, **WARM, **arguments}
    plain = Engine(model, dtype=dtype, enable_prefix_caching=False, **sizes)
    try:
        return [plain.generate(ids, TOKENS, logprobs=5) for ids in PROMPTS]
    finally:
        plain.close()
        gc.collect()


@pytest.fixture(scope="module")
def uneven(model_root: Path) -> Path:
    """A model of five layers, of which the second stage has two."""
    return make_llama(model_root / "llama_five_layers", Shape(layers=5))


@pytest.mark.parametrize("name", ["uneven", "gemma2"])
def test_two_stages_and_one_load_what_the_other_saved(
    start: Start, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(name)
    expected = [answer.tokens for answer in alone(model)]

    two = start(model, 2)
    assert two.core.batch_queue_size == 2
    together = two.generate_all(PROMPTS, TOKENS)
    assert [answer.tokens for answer in together] == expected
    settled(two)
    assert core(two).stats()["disk_reads"] == 0
    from_memory = two.generate_all(PROMPTS, TOKENS)
    assert [answer.tokens for answer in from_memory] == expected
    assert [answer.cached for answer in from_memory] == [len(ids) // BLOCK * BLOCK for ids in PROMPTS]
    settled(two)
    assert core(two).flush(30.0)
    two.close()

    for stages in (2, 1):
        restarted = start(model, stages)
        found = answers(restarted, *PROMPTS)
        assert [answer.tokens for answer in found] == expected, stages
        assert [answer.cached for answer in found] == [len(ids) // BLOCK * BLOCK for ids in PROMPTS], stages
        assert core(restarted).stats()["disk_reads"] > 0
        more = prompt(2 * BLOCK + 1, 30)
        # The second of these engines finds what the first one saved.
        assert restarted.generate(more, 1).cached == (0 if stages == 2 else 2 * BLOCK)
        settled(restarted)
        assert core(restarted).flush(30.0)
        restarted.close()
    [_] = _core.inspect(on_disk(tmp_path)["disk_path"])["namespaces"]


def test_stages_save_the_bytes_of_one(start: Start, uneven: Path) -> None:
    one = start(uneven, 1, {"host_memory": "64MiB"})
    one.generate(LONG, 1)
    computed = pages(one)
    one.close()

    two = start(uneven, 2)
    answers(two, LONG)
    two.close()

    one = start(uneven, 1)
    assert one.generate(LONG, 1).cached == HELD
    for layer, (ours, theirs) in enumerate(zip(computed, pages(one), strict=True)):
        np.testing.assert_array_equal(theirs, ours, err_msg=f"layer {layer}")


def test_a_block_with_a_flipped_byte_is_computed(start: Start, uneven: Path, tmp_path: Path) -> None:
    two = start(uneven, 2)
    [computed] = answers(two, LONG)
    two.close()
    data = Path(on_disk(tmp_path)["disk_path"], "data")
    content = bytearray(data.read_bytes())
    [namespace] = _core.inspect(str(data.parent))["namespaces"]
    for at in payloads(content, namespace["bytes"] // (HELD // BLOCK)):
        content[at] ^= 0x10
    data.write_bytes(content)

    two = start(uneven, 2)
    answer = two.generate(LONG, TOKENS)
    assert (answer.cached, answer.tokens) == (0, computed.tokens)
    assert core(two).stats()["checksum_failures"] > 0


def test_requests_aborted_in_any_step_leave_nothing_behind(start: Start, uneven: Path) -> None:
    """Two batches are in flight: an abort may come while one of them loads or saves."""
    two = start(uneven, 2)
    [computed] = answers(two, LONG)
    two.close()
    two = start(uneven, 2)
    for steps in range(12):
        for name, ids in (("loads", LONG), ("saves", prompt(5 * BLOCK, 40 + steps)), ("stays", prompt(40, 5))):
            add(two, f"{name}{steps}", ids, 6)
        step(two, steps)
        two.llm.llm_engine.abort_request([f"loads{steps}", f"saves{steps}"])
        assert set(finish(two)) >= {f"stays{steps}"}
        settled(two)
    answer = two.generate(LONG, TOKENS)
    assert (answer.cached, answer.tokens) == (HELD, computed.tokens)
    assert core(two).stats()["checksum_failures"] == 0


def test_engines_of_one_stage_and_of_two_use_one_server_at_a_time(start: Start, uneven: Path, tmp_path: Path) -> None:
    server = _core.Engine({"host_memory": 64 << 20, "socket": str(tmp_path / "run" / "serve.sock")})
    try:
        options = {"server": f"unix://{server.arena.socket}", "server_timeout_ms": 30_000, "lookup_spin_us": 100_000}
        two, one = start(uneven, 2, options), start(uneven, 1, options)
        for seed in range(4):
            ids = prompt(4 * BLOCK + 1, seed + 20)
            found = []
            for running in (one, two) if seed % 2 else (two, one):
                found.append(running.generate(ids, TOKENS))
                running.idle_steps()
                assert server.flush(30.0)
            assert [answer.cached for answer in found] == [0, 4 * BLOCK], seed
            assert found[0].tokens == found[1].tokens, seed
        one.close()
        two.close()
    finally:
        server.close()


def test_stages_of_two_ranks_each_load_what_one_rank_saved(start: Start, uneven: Path) -> None:
    one = start(uneven, 1)
    [computed] = answers(one, LONG)
    one.close()
    four = start(uneven, 2, tensor_parallel_size=2)
    loaded, other = answers(four, LONG, OTHER)
    assert (loaded.cached, other.cached) == (HELD, 5 * BLOCK)
    assert Model("llama", uneven, "float32", BLOCK, 0).same(loaded, computed)
    four.close()
    one = start(uneven, 1)
    assert answers(one, OTHER)[0].cached == len(OTHER) // BLOCK * BLOCK


def test_states_of_two_stages(start: Start, qwen3_next: Path) -> None:
    sizes: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096, "blocks": 96}
    ids = prompt(3 * 640 + 1)
    same = Model("qwen3_next", qwen3_next, "bfloat16", 640, 0).same
    two = start(qwen3_next, 2, **sizes)
    [computed] = answers(two, ids)
    two.close()
    for stages in (2, 1):
        running = start(qwen3_next, stages, **sizes)
        answer = running.generate(ids, 16, logprobs=5)
        assert answer.cached == 3 * 640
        assert same(answer, computed), stages
        running.close()
