"""`undercroft check-config`: vLLM's checks of a configuration, without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from undercroft import _core
from undercroft.cli import main


def check(capsys: pytest.CaptureFixture[str], argument: str, code: int = 0) -> dict[str, Any]:
    assert main.main(["check-config", argument, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_check_config_reports_the_values_of_a_start_and_creates_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    options = {"host_memory": "64MiB", "disk_path": str(store), "disk_capacity": "32MiB"}
    found = check(capsys, json.dumps(options))
    assert (found["ok"], found["host_memory"], found["promotion_memory"]) == (True, 64 << 20, 32 << 20)
    assert [(disk["path"], disk["error"]) for disk in found["disks"]] == [(str(store), None)]
    assert found["options"] == options
    assert list(tmp_path.iterdir()) == []


def test_every_form_of_a_configuration_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"kv_connector": "UndercroftConnector", "kv_role": "kv_both"}
    whole["kv_connector_extra_config"] = {"host_memory": "64MiB"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    for argument in (f"@{path}", json.dumps(whole), '{"host_memory": "64MiB"}'):
        assert check(capsys, argument)["host_memory"] == 64 << 20
    monkeypatch.setenv("UNDERCROFT_HOST_MEMORY", "32MiB")
    monkeypatch.setenv("UNDERCROFT_HOTS_MEMORY", "1")
    found = check(capsys, "--env")
    assert found["host_memory"] == 32 << 20
    assert "UNDERCROFT_HOTS_MEMORY is not an option" in found["warnings"][0]


def test_a_remote_store_that_cannot_be_used_now_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD_FILE", "/no/such/file")
    (tmp_path / "file").touch()
    for url, reason in (
        (f"file://{tmp_path}/mount/remote", "mount the file system"),
        (f"file://{tmp_path}/file", "not a directory"),
        ("redis://127.0.0.1:1/0", "REDIS_PASSWORD_FILE"),
    ):
        found = check(capsys, json.dumps({"host_memory": "64MiB", "remote": url}))
        assert found["ok"]
        [warning] = found["warnings"]
        assert url in warning
        assert reason in warning
        assert "vLLM starts all the same" in warning
    found = check(capsys, json.dumps({"host_memory": "64MiB", "remote": f"file://{tmp_path}/remote"}))
    assert found["warnings"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is made"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ('{"host_memroy": "1GiB"}', "did you mean 'host_memory'"),
        ('{"host_memory": "9999TiB"}', "more than the"),
        ('{"host_memory": "1MiB"}', "host_memory = 1 MiB: at least 16 MiB are needed"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("@none", "cannot be read"),
        ('{"kv_connector": "Other"}', "UndercroftConnector"),
        ('{"kv_connector": "UndercroftConnector", "kv_role": "kv_producer"}', "kv_both"),
    ],
)
def test_a_refused_configuration_is_exit_code_2_and_one_line(
    argument: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["check-config", argument]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_check_config_reports_a_directory_that_the_start_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "readme.txt").touch()
    tmp_path.chmod(0o700)
    options = json.dumps({"host_memory": "64MiB", "disk_path": str(tmp_path)})
    found = check(capsys, options, code=2)
    assert not found["ok"]
    assert "holds no undercroft store" in found["disks"][0]["error"]
    with pytest.raises(_core.UndercroftError):
        _core.Engine({"host_memory": 64 << 20, "disks": [{"path": str(tmp_path), "capacity": 32 << 20}]})
    assert main.main(["check-config", options]) == 2
    assert "vLLM refuses to start with it" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_a_warning(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = check(capsys, json.dumps({"server": f"unix://{tmp_path}/none.sock"}))
    assert found["ok"]
    assert "connects when it is there" in found["warnings"][0]
