"""A hybrid model on two ranks: payloads hold the shards of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector_engine import core
from hybrid_engine import HOST, MODELS, Model, ask

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = Model(name, request.getfixturevalue(name), *MODELS[name])
    options = {"host_memory": HOST, "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}
    answers = []
    for start in range(2):
        running = model.start(options, executor="mp", tensor_parallel_size=2)
        try:
            for turn in range(2):
                answer = ask(running, model.ids(3))
                assert answer.cached == (3 * model.block if start or turn else 0)
                answers.append(answer)
            assert core(running).flush(30.0)
            assert (core(running).stats()["disk_reads"] > 0) == (start > 0)
        finally:
            running.close()
    assert all(model.same(answer, answers[0]) for answer in answers)
