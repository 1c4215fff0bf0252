"""Log lines at start about the cache's identity, with an engine of this process or a server's."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from core_values import Group
from undercroft import _core
from undercroft.config import UndercroftConfig
from undercroft.errors import ConfigError
from undercroft.identity import start as identity
from undercroft.identity.namespace import known_by_name
from undercroft.identity.weights import Digests
from undercroft.log import logger

SIZES = {"host_memory": 8 << 20}


def described(weights: str) -> str:
    return json.dumps({"model": {"config": "c", "weights": weights}})


def digests() -> Digests:
    known = Digests()
    known.note_model("one", {"model-1.safetensors": "a", "model-2.safetensors": "b"})
    known.note_model("two", {"model-1.safetensors": "a", "model-2.safetensors": "c"})
    return known


@pytest.mark.parametrize("served", [False, True])
def test_the_weight_file_that_differs_is_named(tmp_path: Path, served: bool) -> None:
    store = tmp_path / "store"
    options = {**SIZES, "disks": [{"path": str(store), "capacity": 32 << 20}], "socket": str(tmp_path / "s")}
    engine = _core.Engine(options)
    engine.register(described("one"), [Group("full", 16, 8192)], 16)
    assert engine.flush()
    where = {"server": f"unix://{tmp_path}/s"} if served else {"disk_path": str(store)}
    config = UndercroftConfig.parse(where)
    assert identity.why_not_reused(described("one"), config, digests()) is None
    expected = "model.weights differs (model-2.safetensors)"
    assert identity.why_not_reused(described("two"), config, digests()) == expected
    engine.close()


def test_a_server_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    config = UndercroftConfig.parse({"server": f"unix://{tmp_path}/nobody"})
    assert identity.why_not_reused(described("two"), config, digests()) is None


@pytest.mark.parametrize("where", [{"server": "unix:///run/undercroft"}, {"disk_path": "/cache"}])
def test_random_hashes_are_refused_where_others_use_the_cache(where: dict[str, str]) -> None:
    config = UndercroftConfig.parse(where)
    with pytest.raises(ConfigError, match=r"with random block hashes: why; .* Set PYTHONHASHSEED") as refused:
        identity.check_seed("why", config, is_shared=True)
    assert next(iter(where.values())) in str(refused.value)


def test_random_hashes_are_warned_of_where_nobody_else_uses_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    for where in ({}, {"disk_path": "/cache"}):
        identity.check_seed("why", UndercroftConfig.parse(where), is_shared=False)
    assert ["/cache" in line for line in said] == [False, True]
    assert all("why." in line and "PYTHONHASHSEED" in line for line in said)


def test_weights_known_by_name_only_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    by_name = {"model": {"names": ["s3://bucket/model", None, None, None]}}
    by_commit = {"model": {"names": ["org/name", None, "abc", None]}}
    draft = {"model": {"weights": "w"}, "draft": {"model": {"names": ["org/draft", None, None, None]}}}
    texts = [json.dumps(one) for one in (by_name, by_commit, draft, {"model": {"id": "me"}, "draft": {"model": None}})]
    assert [known_by_name(text) for text in texts] == [["s3://bucket/model"], [], ["org/draft"], []]
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING)
    try:
        for text in texts:
            identity.warn_of_names(text)
    finally:
        logger.removeHandler(caplog.handler)
    said = list(dict.fromkeys(record.getMessage() for record in caplog.records))
    assert [line.split()[4] for line in said] == ["s3://bucket/model", "org/draft"]
    assert "namespace_salt" in said[0]
