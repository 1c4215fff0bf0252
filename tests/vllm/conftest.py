"""Fixtures of the tests that run a real vLLM engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_checks import Reference
from real_engine import Engine


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this run are made, once for all workers of pytest-xdist."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("models")
    shared = tmp_path_factory.getbasetemp().parent / "models"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def llama(model_root: Path) -> Path:
    """Directory of a Llama model: one group of full attention."""
    from tiny_models import make_llama

    return make_llama(model_root / "llama")


@pytest.fixture(scope="session")
def llama_with_tokenizer(model_root: Path) -> Path:
    """Directory of a Llama model with a tokenizer and a chat template."""
    from tiny_models import make_llama

    return make_llama(model_root / "llama_text", tokenizer=True)


@pytest.fixture(scope="session")
def mixtral(model_root: Path) -> Path:
    """Directory of a model with experts, and with a tokenizer."""
    from tiny_models import make_mixtral

    return make_mixtral(model_root / "mixtral")


@pytest.fixture(scope="session")
def gemma2(model_root: Path) -> Path:
    """Directory of a model with a sliding window group and a full attention group."""
    from tiny_models import make_gemma2

    return make_gemma2(model_root / "gemma2")


@pytest.fixture(scope="session")
def llama4(model_root: Path) -> Path:
    """Directory of a model with a group of chunked local attention and a full attention group."""
    from tiny_models import make_llama4

    return make_llama4(model_root / "llama4")


@pytest.fixture(scope="session")
def phi3(model_root: Path) -> Path:
    """Directory of a model whose rotary factors depend on max_model_len."""
    from tiny_models import make_phi3

    return make_phi3(model_root / "phi3")


@pytest.fixture(scope="session")
def qwen3_next(model_root: Path) -> Path:
    """Directory of a model with a linear attention group and a full attention group."""
    from tiny_models import make_qwen3_next

    return make_qwen3_next(model_root / "qwen3_next")


@pytest.fixture(scope="session")
def reference(llama: Path) -> Iterator[Reference]:
    """The Llama model's tokens without undercroft."""
    plain = Reference(llama)
    yield plain
    plain.close()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines (arguments of `real_engine.Engine`) and closes them when the test ends."""
    started: list[Engine] = []

    def start(*args: Any, **kwargs: Any) -> Engine:
        started.append(Engine(*args, **kwargs))
        return started[-1]

    yield start
    for one in reversed(started):
        one.close()
