"""Beside a connector that brings tokens (P/D in MultiConnector): who loads, which tokens the threshold counts, whose
failures count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_engine import BLOCK, References
from engine_checks import Override
from real_engine import Engine, prompt
from undercroft import plugin

pytestmark = pytest.mark.vllm

TOKENS = 8
WHOLE = 7 * BLOCK
FIRST, SECOND = prompt(WHOLE + 4, seed=21), prompt(WHOLE + 4, seed=22)
REMOTE = {"do_remote_prefill": True}
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    return References(llama, (FIRST, TOKENS), (SECOND, TOKENS))


@pytest.fixture
def start(engine: Callable[..., Engine], llama: Path, tmp_path: Path) -> Start:
    """Starts an engine with both connectors; ``order``: which stands first."""

    def start(order: str, policy: str = "fail", **options: Any) -> Engine:
        plugin.register()
        ours = {"kv_connector": "UndercroftConnector", "kv_connector_extra_config": {"host_memory": "64MiB", **options}}
        remote = {
            "kv_connector": "RemoteConnector",
            "kv_connector_module_path": "remote_connector",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        }
        children = [ours, remote] if order == "ours first" else [remote, ours]
        return engine(
            llama,
            {"connectors": [{"kv_role": "kv_both", **child} for child in children]},
            connector="MultiConnector",
            max_model_len=2048,
            transfer={"kv_load_failure_policy": policy},
        )

    return start


def ours_of(one: Engine) -> Any:
    [ours] = [child for child in one.connector._connectors if getattr(child, "is_undercroft", False)]
    return ours


def prefill(one: Engine, ids: list[int]) -> None:
    """As the prefill instance does: its values are there for the other connector, and undercroft has them, too."""
    params = {"do_remote_decode": True, "cache_hit_threshold": 0}
    one.generate(ids, 1, params=params)
    one.idle_steps()
    assert one.reset_device_cache()


@pytest.mark.parametrize("order", ["ours first", "ours last"])
def test_blocks_of_another_connector_count_for_the_threshold_and_are_left_to_it(
    start: Start, reference: References, order: str
) -> None:
    one = start(order, cache_hit_threshold=0.001, client_fields="threshold")
    prefill(one, FIRST)
    assert ours_of(one).reset_cache()
    decoded = one.generate(FIRST, TOKENS, params=dict(REMOTE))
    assert (decoded.finish_reason, decoded.cached, decoded.tokens) == ("length", WHOLE, reference(FIRST, TOKENS))
    one.idle_steps()
    assert one.reset_device_cache()
    # Undercroft has saved it meanwhile, and would load it.
    lookups = ours_of(one)._scheduler.lookups
    session = lookups._session
    asked: list[str] = []
    watched = {name: watch(session, name, asked) for name in ("prefetch", "lookup")}
    lookups._session = Override(session, watched)
    again = one.generate(FIRST, TOKENS, params=dict(REMOTE))
    assert (again.cached, again.tokens, asked) == (WHOLE, reference(FIRST, TOKENS), [])
    one.idle_steps()
    assert one.reset_device_cache()
    loaded = one.generate(FIRST, TOKENS)
    assert (loaded.cached, loaded.tokens) == (WHOLE, reference(FIRST, TOKENS))
    assert "lookup" in asked
    # Neither has it.
    rejected = one.generate(SECOND, TOKENS, params=dict(REMOTE))
    assert (rejected.finish_reason, rejected.tokens) == ("cache_threshold", [])


@pytest.mark.parametrize("order", ["ours first", "ours last"])
def test_the_policy_for_failed_loads_is_ours_for_ours_and_the_configured_one_for_others(
    start: Start, reference: References, order: str
) -> None:
    one = start(order)
    prefill(one, FIRST)
    prefill(one, SECOND)
    scheduler = ours_of(one)._scheduler
    session = scheduler._session
    scheduler._session = Override(session, {"begin_load": lambda *_: None})
    failed = [
        one.generate(FIRST, TOKENS, params={**REMOTE, "fails": True}),
        one.generate(SECOND, TOKENS),
    ]
    assert [(result.finish_reason, result.tokens) for result in failed] == [
        ("error", []),
        ("length", reference(SECOND, TOKENS)),
    ]
    scheduler._session = session
    one.idle_steps()
    assert one.reset_device_cache()
    assert one.generate(FIRST, TOKENS).cached == WHOLE


def watch(session: Any, name: str, asked: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return getattr(session, name)(*args, **kwargs)

    return call
