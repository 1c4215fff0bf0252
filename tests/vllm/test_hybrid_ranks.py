"""A hybrid model on two ranks: payloads hold the shards of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector_engine import core
from hybrid_engine import HOST, MODELS, Model, ask
from real_engine import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FINE = 64
"""Tokens of a hash where hits may end inside a block."""


@pytest.mark.parametrize(
    ("name", "fine"), [*((name, False) for name in MODELS), ("qwen3_next", True)], ids=[*MODELS, "tails"]
)
def test_two_ranks(
    name: str, fine: bool, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = Model(name, request.getfixturevalue(name), *MODELS[name])
    options = {"host_memory": HOST, "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}
    ids = prompt(model.block + 200) if fine else model.ids(3)
    cached = (model.block + 200) // FINE * FINE if fine else 3 * model.block
    answers = []
    for start in range(2):
        arguments = {"prefix_match_unit": FINE} if fine else {}
        running = model.start(options, executor="mp", tensor_parallel_size=2, **arguments)
        try:
            for turn in range(2):
                answer = ask(running, ids)
                assert answer.cached == (cached if start or turn else 0)
                answers.append(answer)
            assert core(running).flush(30.0)
            assert (core(running).stats()["disk_reads"] > 0) == (start > 0)
        finally:
            running.close()
    assert all(model.same(answer, answers[0]) for answer in answers)
