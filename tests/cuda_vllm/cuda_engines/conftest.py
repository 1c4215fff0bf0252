"""Fixtures of the engines of vLLM's CUDA wheel on the fake CUDA, or on a GPU (`tools/gpu_day`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fake_cuda
import fake_device
from fake_cuda import Fake

if fake_device.is_loaded():
    import torch

    torch.cuda.init()
    fake_device.prepare()

from real_engine import Engine


@pytest.fixture(scope="session", autouse=True)
def computing() -> Iterator[None]:
    with fake_device.computing():
        yield


@pytest.fixture
def fake() -> Fake | fake_device.Untouched:
    """On a GPU nothing is slowed down or counted."""
    return Fake() if fake_cuda.is_loaded() else fake_device.Untouched()


@pytest.fixture(autouse=True)
def rules(fake: Any) -> Iterator[None]:
    """After each test: all work has run without an error, and no rule of the driver was broken."""
    import torch

    if not fake_cuda.is_loaded():
        yield
        return
    from compute import take_errors

    take_errors()
    fake.forget_violations()
    yield
    fake.delays(0, 0)
    fake.copies_at(0)
    torch.cuda.synchronize()
    assert not take_errors()
    assert not fake.violations()


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama(model_root: Path) -> Path:
    from tiny_models import Shape, make_llama

    shape = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=32)
    return make_llama(model_root / "llama", shape)


@pytest.fixture(scope="session")
def gemma2(model_root: Path) -> Path:
    from tiny_models import make_gemma2

    return make_gemma2(model_root / "gemma2")


@pytest.fixture(scope="session")
def lfm2(model_root: Path) -> Path:
    from tiny_models import Shape, make_lfm2

    shape = Shape(hidden=128, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=32)
    return make_lfm2(model_root / "lfm2", shape)


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines (arguments of `real_engine.Engine`) and closes them when the test ends."""
    started: list[Engine] = []

    def start(*args: Any, **kwargs: Any) -> Engine:
        started.append(Engine(*args, **{**fake_device.ENGINE, "blocks": 70, **kwargs}))
        return started[-1]

    yield start
    for one in reversed(started):
        one.close()


@pytest.fixture(scope="session")
def reference(llama: Path) -> Iterator[Callable[[Sequence[int], int], list[int]]]:
    """The Llama model's tokens without undercroft, one prompt at a time, on a device that is not slowed down."""
    from engine_checks import Reference

    plain = Reference(llama, **fake_device.ENGINE)
    yield plain
    plain.close()
