"""Hybrid models in real engines: a hit ends only where every group has its blocks, and then its tokens are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_engine import core, settled
from hybrid_engine import BEST, HOST, MODELS, Crowd, Model, ask
from real_engine import Engine, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.usefixtures("least_recent")]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    """Each of the models."""
    directory: Path = request.getfixturevalue(request.param)
    return Model(request.param, directory, *MODELS[request.param])


@pytest.fixture
def start(model: Model) -> Any:
    """Makes engines of the model and closes them when the test ends."""
    started: list[Engine] = []

    def make(options: dict[str, Any] | None, **arguments: Any) -> Engine:
        started.append(model.start(options, **arguments))
        return started[-1]

    yield make
    for one in reversed(started):
        one.close()


Start = Callable[..., Engine]


def disk(tmp_path: Path) -> dict[str, Any]:
    return {"host_memory": HOST, "disk_path": str(tmp_path / "cache"), "disk_capacity": "2GiB"}


def test_from_host_memory_turn_by_turn_and_where_prefixes_part(model: Model, start: Start) -> None:
    running = start({"host_memory": HOST})
    block = model.block
    ids = model.ids(3)
    cold = ask(running, ids)
    assert cold.cached == 0
    warm = ask(running, ids)
    assert warm.cached == 3 * block
    assert model.same(warm, cold)

    # The next turn goes on from this one's end.
    turn = ids + cold.tokens + prompt(block, seed=5)
    second = ask(running, turn)
    assert second.cached == 3 * block
    assert running.reset_device_cache(connector=True)
    assert model.same(ask(running, turn), second)

    # Nothing had asked for a boundary where these prompts part: it comes to be when the first of them is computed.
    parts = 2 * block
    siblings = [ids[:parts] + prompt(block + 9, seed=seed) for seed in (7, 8)]
    running.reset_device_cache(connector=True)
    alone = [ask(running, sibling) for sibling in siblings[1:]]
    running.reset_device_cache(connector=True)
    ask(running, ids)
    first = ask(running, siblings[0])
    assert first.cached == 0
    shared = ask(running, siblings[1])
    assert shared.cached == parts
    assert model.same(shared, alone[0])
    assert core(running).stats()["load_failures"] == 0


def test_after_a_restart_and_from_every_mixture_of_tiers(model: Model, start: Start, tmp_path: Path) -> None:
    blocks = 5
    first = start(disk(tmp_path))
    cold = [ask(first, model.ids(count)) for count in range(1, blocks + 1)]
    assert core(first).flush(30.0)
    first.close()
    running = start(disk(tmp_path))
    crowd = Crowd(running)
    warm = ask(running, model.ids(blocks))
    assert warm.cached == blocks * model.block
    assert model.same(warm, cold[-1])
    assert core(running).stats()["disk_reads"] > blocks
    full = model.ids(blocks)
    for host in range(blocks + 1):
        for device in range(host + 1):
            crowd.push()
            if host:
                assert ask(running, model.ids(host), 1).cached == host * model.block
            if device:
                assert ask(running, model.ids(device), 1, reset=False).cached == device * model.block
            reads = core(running).stats()["disk_reads"]
            answer = ask(running, full)
            split = f"{device} blocks on the device, {host - device} in host memory, {blocks - host} on disk"
            assert answer.cached == blocks * model.block, split
            assert model.same(answer, cold[-1]), split
            assert (core(running).stats()["disk_reads"] > reads) == (host < blocks), split
    stats = core(running).stats()
    assert (stats["load_failures"], stats["checksum_failures"]) == (0, 0)


def test_a_shorter_prompt_than_the_device_computed(model: Model, start: Start) -> None:
    running = start({"host_memory": HOST})
    cold = [ask(running, model.ids(count)) for count in (1, 2, 3)]
    # The device holds all blocks of full attention, and window or state at the end only.
    assert model.same(ask(running, model.ids(3), reset=False), cold[2])
    for count in (2, 1):
        answer = ask(running, model.ids(count), reset=False)
        assert answer.cached == count * model.block
        assert model.same(answer, cold[count - 1])


def test_bytes_of_another_prompt_would_be_noticed(model: Model, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from undercroft.connector.scheduler import scheduler

    running = start({"host_memory": HOST})
    cold = ask(running, model.ids(3))
    ask(running, model.ids(3, seed=4))
    plans: list[Any] = []
    plan = scheduler.plan_load

    def remember(*args: Any) -> Any:
        plans.append(plan(*args))
        return plans[-1]

    monkeypatch.setattr(scheduler, "plan_load", remember)
    ask(running, model.ids(3, seed=4))

    def swapped(*args: Any) -> Any:
        planned = remember(*args)
        (ours,) = [copy for copy in planned.job.groups if copy.group == model.optional_group]
        (theirs,) = [copy for copy in plans[0].job.groups if copy.group == model.optional_group]
        ours.offsets = theirs.offsets.copy()
        return planned

    monkeypatch.setattr(scheduler, "plan_load", swapped)
    wrong = ask(running, model.ids(3))
    assert wrong.cached == 3 * model.block
    assert not model.same(wrong, cold)
    monkeypatch.setattr(scheduler, "plan_load", plan)
    assert model.same(ask(running, model.ids(3)), cold)


def test_abort_while_loading(model: Model, start: Start) -> None:
    from vllm import SamplingParams

    running = start({"host_memory": HOST})
    cold = ask(running, model.ids(3))
    llm = running.llm.llm_engine
    params = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    for steps in range(3):
        llm.add_request(f"gone-{steps}", {"prompt_token_ids": model.ids(3)}, params)
        for _ in range(steps):
            llm.step()
        llm.abort_request([f"gone-{steps}"])
        while llm.has_unfinished_requests():
            llm.step()
        settled(running)
    warm = ask(running, model.ids(3))
    assert warm.cached == 3 * model.block
    assert model.same(warm, cold)


def test_preempted_requests_resume(model: Model, start: Start) -> None:
    # Each needs one more block of every group while it generates, and there are not enough for all.
    length, blocks, longest = (150, 14, 768) if model.name == "gemma2" else (40, 12, 2048)
    prompts = [model.ids(2, extra=model.block - 10 - seed, seed=seed) for seed in range(3)]
    alone = start({"host_memory": HOST})
    expected = [ask(alone, ids, length) for ids in prompts]
    alone.close()
    crowded = start({"host_memory": HOST}, blocks=blocks, max_model_len=longest)
    preempted: list[str] = []
    allocated = crowded.connector.update_state_after_alloc

    def listening(request: Any, blocks: Any, external: int) -> None:
        if request.num_preemptions:
            preempted.append(request.request_id)
        allocated(request, blocks, external)

    crowded.connector.update_state_after_alloc = listening
    answers = crowded.generate_all(prompts, length, logprobs=BEST)
    settled(crowded)
    assert preempted
    # Who shares a step with whom rounds otherwise, and depends on when a load ends.
    assert all(model.same(answer, one) for answer, one in zip(answers, expected, strict=True))
