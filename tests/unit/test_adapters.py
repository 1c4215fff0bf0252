"""Keys of LoRA adapters: by their files, and of this process alone where those do not say it all."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from undercroft.identity import adapters
from undercroft.identity.adapters import Adapters


def adapter(path: Path | str, name: str = "sql") -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """An adapter's directory."""
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_the_same_files_give_the_same_key_in_every_process(files: Path) -> None:
    assert Adapters().key(adapter(files)) == Adapters().key(adapter(files))


@pytest.mark.parametrize("changed", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_changed_before_the_start_give_another(files: Path, changed: str) -> None:
    before = Adapters().key(adapter(files))
    (files / changed).write_text("other")
    assert Adapters().key(adapter(files)) != before


def test_an_adapter_that_is_read_in_another_way_is_another(files: Path) -> None:
    flat, deep = adapter(files), adapter(files)
    deep.is_3d_lora_weight = True
    ours = Adapters()
    requests = [SimpleNamespace(lora_request=one) for one in (flat, deep, flat, deep)]
    first, second, *again = [ours.of_request(one) for one in requests]
    assert first != second and again == [first, second]
    assert [Adapters().key(flat), Adapters().key(deep)] == [first, second], "the same in every process"


def test_files_that_change_later_give_a_key_of_this_process(files: Path) -> None:
    ours = Adapters()
    before = ours.key(adapter(files))
    (files / "adapter_model.safetensors").write_text("other")
    after = ours.key(adapter(files))
    assert after not in (before, Adapters().key(adapter(files)))
    assert ours.key(adapter(files)) == after


def test_files_that_changed_and_came_back_are_not_believed(files: Path) -> None:
    ours, config = Adapters(), files / "adapter_config.json"
    before, old = ours.key(adapter(files)), config.read_text()
    config.write_text("other")
    ours.key(adapter(files))
    config.write_text(old)
    assert Adapters().key(adapter(files)) == before != ours.key(adapter(files))


@pytest.mark.parametrize(
    "path", ["somebody/adapter-that-is-not-here", "not a name at all", "/nowhere", "~nobody-of-this-name/sql"]
)
def test_files_that_cannot_be_seen_give_a_key_of_this_process(path: str) -> None:
    ours = Adapters()
    assert ours.key(adapter(path)) == ours.key(adapter(path)) != Adapters().key(adapter(path))


def test_the_key_of_a_request_is_that_of_its_adapter(files: Path) -> None:
    ours = Adapters()
    request = SimpleNamespace(lora_request=adapter(files))
    assert ours.of_request(request) == ours.key(adapter(files))


def test_requests_look_at_the_files_once_a_second(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, looks, now = Adapters(), [], [100.0]
    digest = adapters.weights_digest
    monkeypatch.setattr(adapters, "weights_digest", lambda *args: (looks.append(args), digest(*args))[1])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    request = SimpleNamespace(lora_request=adapter(files))
    keys = {ours.of_request(request) for _ in range(1000)}
    assert (len(keys), len(looks)) == (1, 1)
    (files / "adapter_model.safetensors").write_text("other")
    now[0] += 0.99
    assert {ours.of_request(request)} == keys
    now[0] += 0.02
    assert not keys & {ours.of_request(request)}
    assert len(looks) == 2


def test_an_adapter_that_is_about_to_be_loaded_is_looked_at_at_once(files: Path) -> None:
    ours = Adapters()
    request = SimpleNamespace(lora_request=adapter(files))
    before = ours.of_request(request)
    (files / "adapter_model.safetensors").write_text("other")
    after = ours.key(adapter(files))
    assert after not in (before, Adapters().key(adapter(files)))
    assert ours.of_request(request) == after


def test_a_new_engine_of_the_process_looks_at_the_files_at_once(files: Path) -> None:
    ours = Adapters()
    before = ours.of_request(request := SimpleNamespace(lora_request=adapter(files)))
    (files / "adapter_model.safetensors").write_text("other")
    ours.look_again()
    assert ours.of_request(request) != before
