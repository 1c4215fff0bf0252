"""vLLM's workers tell undercroft before the device loses its memory, or a tool suspends it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.worker.gpu_worker import Worker

from undercroft import registration, vllm_patches


def fail(*_: Any) -> NoReturn:
    raise AssertionError("it must not be called")


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's worker as it is without undercroft; afterwards as it was before the test."""
    for name in ("sleep", "wake_up", "discard", "checkpoint_prepare"):
        function = getattr(Worker, name)
        while hasattr(function, "_undercroft"):
            function = function.__wrapped__
        monkeypatch.setattr(Worker, name, function)
    yield


class Sleeping:
    """Stands in for an undercroft connector in a worker."""

    is_undercroft = True

    def __init__(self, told: list[str]) -> None:
        self.unregister_kv_caches = lambda: told.append("copies end")
        self.restore_kv_caches = lambda: told.append("copies begin")
        self.release_pinned_memory = lambda: told.append("nothing is pinned")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What vLLM's worker and undercroft's connector in it are told, in order."""
    told: list[str] = []
    group: Any = SimpleNamespace(_connectors=[Sleeping(told)])
    monkeypatch.setattr("vllm.distributed.kv_transfer.has_kv_transfer_group", lambda: True)
    monkeypatch.setattr("vllm.distributed.kv_transfer.get_kv_transfer_group", lambda: group)
    return told


@pytest.mark.usefixtures("unpatched")
def test_copies_end_before_the_device_loses_its_memory(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr(Worker, "sleep", lambda self, level=1: told.append(f"sleep {level}"))
    monkeypatch.setattr(Worker, "wake_up", lambda self, tags=None: told.append(f"wake {tags}"))
    monkeypatch.setattr(Worker, "discard", lambda self, tags: told.append(f"discard {tags}"))
    # Newer versions of vLLM call connectors themselves.
    called_by_vllm = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
    assert vllm_patches.end_copies_before_sleep(registration.ours_in)
    worker: Any = object.__new__(Worker)
    worker.sleep(2)
    worker.wake_up(["weights"])
    worker.wake_up(tags=["kv_cache"])
    worker.discard(("weights",))
    worker.discard(("kv_cache",))
    vllms = ["sleep 2", "wake ['weights']", "wake ['kv_cache']", "discard ('weights',)", "discard ('kv_cache',)"]
    if called_by_vllm:
        assert told == vllms
    else:
        assert told == ["copies end", *vllms[:3], "copies begin", vllms[3], "copies end", vllms[4]]


@pytest.mark.usefixtures("unpatched")
def test_nothing_is_pinned_when_a_tool_suspends_the_device(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr(Worker, "checkpoint_prepare", lambda self: told.append("prepared"))
    assert vllm_patches.leave_device_before_checkpoint(registration.ours_in)
    worker: Any = object.__new__(Worker)
    worker.checkpoint_prepare()
    assert told == ["nothing is pinned", "prepared"]


@pytest.mark.usefixtures("unpatched")
def test_sleep_without_a_connector_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.distributed.kv_transfer.has_kv_transfer_group", lambda: False)
    monkeypatch.setattr(Worker, "sleep", lambda self, level=1: level)
    assert vllm_patches.end_copies_before_sleep(fail)
    assert object.__new__(Worker).sleep(2) == 2
