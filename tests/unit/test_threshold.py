"""The hit threshold's decision and parameters, without vLLM."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from undercroft import threshold
from undercroft.threshold.params import InvalidThresholdError, of_request, parse
from undercroft.threshold.policy import MAX_ASKS, HitThreshold, Rejection, logger
from undercroft.vllm_patches import frontend, rejections


@pytest.fixture
def log() -> Iterator[list[logging.LogRecord]]:
    """The log records, from a handler of its own, since vLLM stops its loggers from propagating."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep()
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def request(tokens: int = 1000, name: str = "r", extra_args: Any = None, **fields: Any) -> Any:
    """The fields of vLLM's request that the policy reads."""
    return SimpleNamespace(
        **{
            "request_id": name,
            "num_tokens": tokens,
            "sampling_params": SimpleNamespace(extra_args=extra_args),
            "kv_transfer_params": (extra_args or {}).get("kv_transfer_params"),
            "resumable": False,
            "skip_reading_prefix_cache": False,
        }
        | fields
    )


@pytest.mark.parametrize(("value", "meant"), [(0, 0.0), (1, 1.0), (0.33, 0.33), (1.0, 1.0), (5e-324, 5e-324)])
def test_valid_values(value: float, meant: float) -> None:
    assert parse(value) == meant
    assert isinstance(parse(value), float)


@pytest.mark.parametrize(
    "value",
    [True, False, "0.5", None, [], {}, math.nan, math.inf, -1e-9, 1.0000001, 2, -1, pytest.param(10**400, id="huge")],
)
def test_invalid_values_are_named(value: Any) -> None:
    with pytest.raises(InvalidThresholdError) as caught:
        parse(value)
    message = str(caught.value)
    assert "cache_hit_threshold" in message
    assert repr(value) in message
    assert "from 0" in message
    assert "to 1" in message


def test_where_a_request_may_carry_it() -> None:
    assert of_request(None) is None
    assert of_request({}) is None
    assert of_request({"other": 1, "kv_transfer_params": {"do_remote_decode": True}}) is None
    assert of_request({"cache_hit_threshold": None, "kv_transfer_params": {"cache_hit_threshold": None}}) is None
    assert of_request({"cache_hit_threshold": 0.5}) == 0.5
    assert of_request({"kv_transfer_params": {"cache_hit_threshold": 0.25}}) == 0.25
    assert of_request({"cache_hit_threshold": 0, "kv_transfer_params": {"cache_hit_threshold": 0.25}}) == 0
    assert of_request({}, {"cache_hit_threshold": 0.25}) == 0.25
    assert of_request({"kv_transfer_params": "not an object"}) is None
    with pytest.raises(InvalidThresholdError, match=r"kv_transfer_params\.cache_hit_threshold = 7"):
        of_request({"cache_hit_threshold": 0.5, "kv_transfer_params": {"cache_hit_threshold": 7}})


def test_ratio_is_of_local_and_external_tokens_over_all() -> None:
    policy = HitThreshold(0.5)
    assert policy.check(request(), 0, 499)
    assert policy.check(request(), 300, 199)
    assert not policy.check(request(), 300, 200)
    assert not policy.check(request(), 1000, 0)
    # After preemption the generated tokens must be there too.
    assert policy.check(request(1001), 300, 200)


def test_the_tokens_needed_are_the_least_that_are_not_rejected() -> None:
    for required in (1, 2, 3, 7, 100, 897, 131_072):
        for threshold_ in (0.001, 0.1, 0.29, 1 / 3, 0.5, 0.58, 0.7, 0.999, 1.0):
            policy = HitThreshold(threshold_)
            asking = request(required)
            needed = policy.needed_tokens(asking)
            assert 0 < needed <= required
            assert not policy.check(asking, 0, needed)
            assert policy.check(asking, 0, needed - 1)
    assert HitThreshold(0.0).needed_tokens(request(100)) == 0
    assert HitThreshold(0.5).needed_tokens(request(100, extra_args={"cache_hit_threshold": 0})) == 0
    assert HitThreshold(0.5).needed_tokens(request(0)) == 0


def test_threshold_one_is_reached_only_by_everything() -> None:
    policy = HitThreshold(1.0)
    assert policy.check(request(), 999, 0)
    assert not policy.check(request(), 999, 1)


def test_a_request_threshold_overrides_the_global_one_even_at_0() -> None:
    policy = HitThreshold(0.5)
    assert not policy.check(request(extra_args={"cache_hit_threshold": 0}), 0, 0)
    assert not policy.check(request(extra_args={"cache_hit_threshold": 0.1}), 100, 0)
    assert policy.check(request(extra_args={"cache_hit_threshold": 0.9}), 899, 0)
    assert policy.check(request(extra_args={"unrelated": 1}), 499, 0)
    assert [rejection.source for rejection in policy.collect()] == ["global"]


def test_never_rejected() -> None:
    policy = HitThreshold(1.0)
    assert not policy.check(request(0), 0, 0)
    assert not policy.check(request(sampling_params=None), 0, 0)
    assert not policy.check(request(resumable=True), 0, 0)
    assert policy.collect() == []


def test_a_request_that_reads_no_cache_has_nothing_cached() -> None:
    policy = HitThreshold(0.1)
    assert policy.check(request(skip_reading_prefix_cache=True), 1000, 0)
    [rejection] = policy.collect()
    assert (rejection.local_tokens, rejection.hit_rate) == (0, 0.0)


def test_last_answer_holds_and_is_taken_once() -> None:
    policy = HitThreshold(0.5)
    assert policy.check(request(), 0, 0)
    assert policy.check(request(), 100, 0)
    assert policy.check(request(name="other"), 0, 0)
    assert not policy.check(request(), 900, 0)  # meanwhile another request has filled the cache
    assert [rejection.request_id for rejection in policy.collect()] == ["other"]
    assert policy.collect() == []
    assert policy.rejections == {"request": 0, "global": 1}


def test_discarded_requests_are_forgotten() -> None:
    policy = HitThreshold(0.5)
    policy.discard("unknown")
    policy.check(request(), 0, 0)
    policy.discard("r")
    assert policy.collect() == []
    assert policy.rejections == {"request": 0, "global": 0}


def test_stands_aside_if_nobody_takes_the_rejected(log: list[logging.LogRecord]) -> None:
    policy = HitThreshold(0.5)
    answers = [policy.check(request(), 0, 0) for _ in range(MAX_ASKS + 3)]
    assert answers == [True] * MAX_ASKS + [False] * 3
    assert policy.collect() == []
    assert [record.levelname for record in log] == ["ERROR"]


def test_a_bad_value_that_slipped_through_is_ignored_and_said_once(log: list[logging.LogRecord]) -> None:
    policy = HitThreshold(0.0)
    for _ in range(3):
        assert not policy.check(request(extra_args={"cache_hit_threshold": "x"}), 0, 0)
    assert [record.levelname for record in log] == ["WARNING"]
    assert "'x'" in log[0].getMessage()


@pytest.mark.parametrize(
    ("local", "external", "required", "threshold_", "text"),
    [
        (256, 0, 897, 0.33, "cache hit rate 0.28 < threshold 0.33 (request)"),
        (329, 0, 1000, 0.33, "cache hit rate 0.32 < threshold 0.33 (request)"),
        (999, 0, 1000, 1.0, "cache hit rate 0.99 < threshold 1 (request)"),
        (0, 29, 100, 0.3, "cache hit rate 0.29 < threshold 0.3 (request)"),
        (0, 0, 1, 0.001, "cache hit rate 0.00 < threshold 0.001 (request)"),
    ],
)
def test_log_line(local: int, external: int, required: int, threshold_: float, text: str) -> None:
    rejection = Rejection("cmpl-1", threshold_, "request", local, external, required)
    assert str(rejection) == f"Request cmpl-1 rejected: {text}"


def test_response_params_do_not_carry_the_threshold_on() -> None:
    rejection = Rejection("cmpl-1", 0.33, "global", 256, 128, 1000)
    answer = rejection.response_params()
    assert of_request({"kv_transfer_params": answer}) is None
    assert answer["cache_threshold"] == {
        "hit_rate": 0.384,
        "threshold": 0.33,
        "source": "global",
        "local_tokens": 256,
        "external_tokens": 128,
        "required_tokens": 1000,
    }


def test_unknown_vllm_refuses_a_configured_threshold() -> None:
    with pytest.raises(
        threshold.ThresholdUnavailableError, match=r"cache_hit_threshold = 0\.3 .*no update_from_output"
    ):
        threshold.for_connector(0.3, "Scheduler has no update_from_output")


def test_unknown_vllm_without_a_threshold_warns_and_rejects_nothing(log: list[logging.LogRecord]) -> None:
    policy = threshold.for_connector(0.0, "Scheduler has no update_from_output")
    assert [record.levelname for record in log] == ["WARNING"]
    for _ in range(3):
        assert not policy.check(request(extra_args={"cache_hit_threshold": 0.9}), 0, 0)
    assert len(log) == 2  # and one for the first request that asked for it


class FakeScheduler:
    """The parts of vLLM's scheduler that the wrapper uses."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.requests: dict[str, Any] = {}
        self.finished: list[tuple[list[str], str]] = []

    def finish_requests(self, names: list[str], status: str) -> None:
        self.finished.append((names, status))
        for name in names:
            self.requests.pop(name, None)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        return {0: SimpleNamespace(outputs=["normal"])}


def wrapped() -> Any:
    return rejections.wrap_update_from_output(
        FakeScheduler.update_from_output, "ABORTED", SimpleNamespace, SimpleNamespace
    )


def live(name: str, client: int) -> Any:
    return SimpleNamespace(
        request_id=name,
        client_index=client,
        trace_headers={"t": name},
        is_finished=lambda: False,
        get_finished_reason=lambda: "ABORT",
        take_events=lambda: ["queued"],
    )


def test_rejected_requests_end_and_reach_their_own_clients() -> None:
    rejected = [Rejection(name, 0.5, "request", 0, 0, 10) for name in ("a", "b", "gone")]
    pending = [rejected]
    scheduler = FakeScheduler(SimpleNamespace(take_threshold_rejects=lambda: pending.pop() if pending else []))
    scheduler.requests = {"a": live("a", 0), "b": live("b", 3), "other": live("other", 0)}
    update = wrapped()
    outputs = update(scheduler, None, None)
    assert scheduler.finished == [(["a", "b", "gone"], "ABORTED")]
    assert list(scheduler.requests) == ["other"]
    normal, a = outputs[0].outputs
    [b] = outputs[3].outputs
    assert normal == "normal"
    assert (a.request_id, b.request_id) == ("a", "b")
    assert (a.new_token_ids, a.finish_reason, a.stop_reason) == ([], "ABORT", "cache_threshold")
    assert a.kv_transfer_params == rejected[0].response_params()
    assert a.events == ["queued"]
    assert update(scheduler, None, None) == {0: SimpleNamespace(outputs=["normal"])}
    assert len(scheduler.finished) == 1


@pytest.mark.parametrize(
    "connector", [None, SimpleNamespace(), SimpleNamespace(_connectors=[SimpleNamespace()]), Mock()]
)
def test_schedulers_without_undercroft_are_left_alone(connector: Any) -> None:
    scheduler = FakeScheduler(connector)
    assert wrapped()(scheduler, None, None) == {0: SimpleNamespace(outputs=["normal"])}
    assert scheduler.finished == []


def test_found_inside_other_connectors() -> None:
    ours = SimpleNamespace(take_threshold_rejects=lambda: ["x"])
    nested = SimpleNamespace(_connectors=[SimpleNamespace(), SimpleNamespace(_connectors=[ours])])
    take = rejections.find_take(nested)
    assert take is not None
    assert take() == ["x"]


def test_empty_delta_is_true_and_holds_nothing() -> None:
    delta = frontend.EmptyDelta()
    assert delta
    assert len(delta) == 0
    assert [*delta, 1] == [1]


@pytest.mark.parametrize("children", [None, 7, "text"])
def test_connectors_with_other_things_inside_are_left_alone(children: Any) -> None:
    scheduler = FakeScheduler(SimpleNamespace(_connectors=children))
    assert wrapped()(scheduler, None, None) == {0: SimpleNamespace(outputs=["normal"])}


def test_further_arguments_of_the_output_processor_are_passed_on() -> None:
    def process_outputs(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*args, kwargs)

    wrapped_process = frontend.wrap_process_outputs(process_outputs, object)
    outputs = [SimpleNamespace(stop_reason=None)]
    assert wrapped_process("self", outputs, 1.0, None, "weights", more=1) == (
        "self", outputs, 1.0, None, "weights", {"more": 1},
    )  # fmt: skip
