"""The hit threshold on one real engine: requests of which too little is cached come back unserved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real_engine import Engine, prompt
from threshold_engine import FIFTH, HALF, WHOLE, limit, make, nothing_left, rejected

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def running(llama: Path) -> Iterator[Engine]:
    one = make(llama)
    yield one
    one.close()


@pytest.fixture
def shared(running: Engine) -> Iterator[Engine]:
    """An engine without a global threshold and with an empty cache; nothing may be left in it afterwards."""
    assert running.reset_device_cache()
    running.connector.threshold.rejections.update(request=0, **{"global": 0})
    yield running
    nothing_left(running)


def test_decided_without_blocks_or_computation(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled: list[int] = []
    execute = shared.core.model_executor.execute_model

    def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled.append(scheduler_output.total_num_scheduled_tokens)
        return execute(scheduler_output, *args, **kwargs)

    monkeypatch.setattr(shared.core.model_executor, "execute_model", counted)
    assert rejected(shared.generate(WHOLE, 8, params=limit(0.1)))
    assert sum(scheduled) == 0
    assert len(scheduled) == 1


def test_a_decision_waits_for_the_lookup_and_counts_its_tokens(shared: Engine) -> None:
    before = shared.steps
    refused = shared.generate(WHOLE, 4, params=limit(0.5) | {"late": 3, "pretend": 256})
    assert rejected(refused)
    assert refused.kv_transfer_params["cache_threshold"]["external_tokens"] == 256
    assert shared.steps - before == 4
    # Together with the device's blocks it is enough.
    shared.generate(WHOLE[:385], 4)
    assert not rejected(shared.generate(WHOLE, 4, params=limit(0.7) | {"pretend": 256}))


@pytest.mark.parametrize("where", ["extra_args", "kv_transfer_params", "both"])
def test_offline_parameters(shared: Engine, where: str) -> None:
    given = {
        "extra_args": {"extra_args": limit(0.5)},
        "kv_transfer_params": {"params": limit(0.5)},
        "both": {"extra_args": limit(0.5), "params": limit(0)},  # the outer one wins
    }[where]
    assert rejected(shared.generate(WHOLE, 4, **given))


BAD = [True, "0.5", float("nan"), float("inf"), -0.01, 1.01, [0.5], {}]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("value", BAD, ids=map(repr, BAD))
def test_bad_values_are_refused_offline(shared: Engine, value: Any, nested: bool) -> None:
    from vllm.exceptions import VLLMValidationError

    given = {"params": limit(value)} if nested else {"extra_args": limit(value)}
    with pytest.raises(VLLMValidationError, match=r"cache_hit_threshold = .*from 0 .*to 1") as caught:
        shared.generate(WHOLE, 4, **given)
    assert repr(value) in str(caught.value)


def test_batch_decides_each_prompt_alone(shared: Engine) -> None:
    expected = [shared.generate(ids, 6).tokens for ids in (WHOLE, HALF)]
    assert shared.reset_device_cache()
    shared.generate(WHOLE, 4)
    prompts = [WHOLE, FIFTH, HALF, prompt(500, seed=3)]
    results = shared.generate_all(prompts, 6, params=limit(0.4))
    assert [rejected(result) for result in results] == [False, True, False, True]
    assert [results[0].tokens, results[2].tokens] == expected


def test_parallel_samples(shared: Engine) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=3, max_tokens=4, temperature=1, detokenize=False, extra_args={"kv_transfer_params": limit(0.5)}
    )
    [refused] = shared.llm.generate([{"prompt_token_ids": WHOLE}], sampling, use_tqdm=False)
    assert [o.finish_reason for o in refused.outputs] == ["cache_threshold"] * 3
    assert [list(o.token_ids) for o in refused.outputs] == [[]] * 3
    assert refused.kv_transfer_params["cache_threshold"]["hit_rate"] == 0


def test_prompt_logprobs_need_the_whole_prefill(shared: Engine) -> None:
    """Such a request reads no cache, so none of it counts."""
    shared.generate(WHOLE, 4)
    assert rejected(shared.generate(WHOLE, 4, params=limit(0.1) | {"pretend": 896}, prompt_logprobs=1))


def test_statistics_of_vllm_leave_rejected_requests_out(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    manager = shared.llm.llm_engine.logger_manager
    assert manager is not None
    record = manager.record

    def kept(*args: Any, **kwargs: Any) -> None:
        seen.append(kwargs["iteration_stats"])
        record(*args, **kwargs)

    monkeypatch.setattr(manager, "record", kept)
    assert rejected(shared.generate(WHOLE, 4, params=limit(0.5)))
    shared.generate(WHOLE, 4)
    finished = [str(request.finish_reason) for stats in seen if stats for request in stats.finished_requests]
    assert finished == ["length"]
    assert sum(len(stats.time_to_first_tokens_iter) for stats in seen if stats) == 1


def test_aborted_before_the_scheduler_takes_it(shared: Engine) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=4, detokenize=False, extra_args=limit(0.5))
    shared.llm.llm_engine.add_request("gone", {"prompt_token_ids": WHOLE}, sampling)
    shared.scheduler.schedule()
    [inner] = shared.scheduler.requests
    shared.llm.llm_engine.abort_request(["gone"])
    assert inner not in shared.scheduler.requests
    assert shared.connector.threshold.collect() == []
    assert shared.connector.threshold.rejections == {"request": 0, "global": 0}


def test_five_hundred_mixed_requests(shared: Engine) -> None:
    shared.generate(WHOLE, 2)
    prompts = [[HALF, FIFTH, WHOLE, prompt(200, seed=i)][i % 4] for i in range(500)]
    results = shared.generate_all(prompts, 2, params=limit(0.4))
    assert [rejected(result) for result in results] == [i % 4 in (1, 3) for i in range(500)]
    assert shared.connector.threshold.rejections["request"] == 250
