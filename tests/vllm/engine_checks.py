"""Helpers of the tests of the whole connector: looking inside, holding things up, and stepping by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from real_engine import Engine

BLOCK = 128
"""Tokens of a device block on the CPU platform."""
PAYLOAD = 4 * BLOCK * 2 * 128 * 4
"""Bytes of a block of the Llama model in float32: layers, tokens, heads, keys and values, size of a number."""


class Reference:
    """The tokens of a vLLM without undercroft, one prompt at a time. Usable while other engines are alive."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        """``arguments``: further ones of its engine."""
        self._model = model
        self._arguments = arguments
        self._engine: Engine | None = None
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, ids: Sequence[int], n: int = 16) -> list[int]:
        known = self._known.get(tuple(ids), [])
        if len(known) < n:
            known = self._known[tuple(ids)] = self._generate(ids, n)
        return known[:n]

    def _generate(self, ids: Sequence[int], n: int) -> list[int]:
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.parallel_state import model_parallel_is_initialized

        if self._engine is not None and not model_parallel_is_initialized():
            # An engine with worker processes has ended, and has taken the groups of this process with it.
            self.close()
            self._engine = None
        # vLLM keeps one connector in a process; this engine has none.
        connector, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
        try:
            if self._engine is None:
                arguments = {"blocks": 64, "enable_prefix_caching": False, **self._arguments}
                self._engine = Engine(self._model, **arguments)
            return self._engine.generate(ids, n).tokens
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = connector

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def stats(one: Engine) -> dict[str, Any]:
    """The engine's counters and gauges."""
    return one.connector._engine.stats()


def inject_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engines that are opened from now on have disks that are as fast as a test says (``limit_reads``)."""
    from undercroft import engine

    options = engine.engine_options
    with_faults: Any = lambda *args, **kwargs: options(*args, **kwargs) | {"inject_faults": True}  # noqa: E731
    monkeypatch.setattr(engine, "engine_options", with_faults)


def worker() -> Any:
    """The worker's half of the connector of the engine in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def flush(one: Engine) -> None:
    """Wait until everything saved is on disk."""
    assert one.connector._engine.flush(30.0)


def nothing_left(one: Engine, *, reset: bool = True) -> None:
    """No request, lookup, load, save, lease or device block remains; then empty the device's cache."""
    one.idle_steps()
    assert one.scheduler.requests == {}
    assert not (one.scheduler.waiting or one.scheduler.deferred_waiting or one.scheduler.kv_holding_waiting)
    assert one.device_blocks_in_use() == 0
    assert one.connector._scheduler.idle()
    if one.connector._engine.info()["disks"]:
        flush(one)
    found = stats(one)
    gauges = ("active_lookups", "loads", "saves", "host_pinned_bytes", "promotion_queue_bytes")
    assert {name: found[name] for name in gauges} == dict.fromkeys(gauges, 0)
    if reset:
        assert one.reset_device_cache()


def add(one: Engine, name: str, ids: Sequence[int], n: int) -> None:
    """Give the engine a request without running it."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=n, detokenize=False, ignore_eos=True)
    one.llm.llm_engine.add_request(name, {"prompt_token_ids": list(ids)}, sampling)


def step(one: Engine, times: int = 1) -> None:
    """Steps whose outputs do not matter."""
    for _ in range(times):
        one.llm.llm_engine.step()


def begun(one: Engine) -> bool:
    """Whether the scheduler has taken up its only request: it computes, or its load is on the way."""
    from vllm.v1.request import RequestStatus

    [request] = one.scheduler.requests.values()
    return request.status is not RequestStatus.WAITING


def step_until(one: Engine, condition: Callable[[], bool]) -> None:
    """Step until something holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not reached within 60 s"
        one.llm.llm_engine.step()


def finish(one: Engine) -> dict[str, list[int]]:
    """Run all requests to their ends; the tokens of those that were not aborted."""
    done = {}
    while one.llm.llm_engine.has_unfinished_requests():
        for output in one.llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    return done


class Override:
    """An object of which some methods are others."""

    def __init__(self, wrapped: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        self.wrapped = wrapped
        self.methods = dict(methods)

    def __getattr__(self, name: str) -> Any:
        return self.methods[name] if name in self.methods else getattr(self.wrapped, name)


def override_session(one: Engine, **methods: Callable[..., Any]) -> Override:
    """Let some methods of the scheduler's session be others, until they are taken out of ``methods`` again."""
    scheduler = one.connector._scheduler
    session = scheduler._session
    if isinstance(session, Override):
        session.methods = dict(methods)
        return session
    scheduler._session = scheduler.lookups._session = scheduler.saves._session = Override(session, methods)
    return scheduler._session
