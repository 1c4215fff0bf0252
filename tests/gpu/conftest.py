"""Tests here run on a CUDA device, or on the fake one (tests/fake_cuda); they are skipped, with the reason, without."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

import fake_cuda

NEED_VLLM = ["test_counts.py", "test_sleep.py", "test_two_ranks.py"]
"""They run the worker's half of the connector. A rented machine may have PyTorch and no vLLM."""
collect_ignore = NEED_VLLM if importlib.util.find_spec("vllm") is None else []


def pytest_report_header() -> str | None:
    return f"vLLM is not installed: {', '.join(collect_ignore)} are left out" if collect_ignore else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and a CUDA build of PyTorch"))
            elif "fake" in getattr(item, "fixturenames", ()) and not fake_cuda.is_loaded():
                item.add_marker(
                    pytest.mark.skip(reason="counts what the driver is asked for; a GPU's driver tells nobody")
                )


@pytest.fixture
def fake() -> fake_cuda.Fake:
    """The fake's counts; a test that asks for them is skipped on a GPU."""
    return fake_cuda.Fake()


@pytest.fixture(autouse=True)
def no_violations() -> Iterator[None]:
    """The driver's rules hold after each test: see `violation` in tests/fake_cuda."""
    yield
    if fake_cuda.is_loaded():
        fake = fake_cuda.Fake()
        torch.cuda.synchronize()
        violations = fake.violations()
        fake.forget_violations()
        assert not violations


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
