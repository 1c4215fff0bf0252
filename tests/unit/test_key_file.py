"""The option `key_file`: said at once if it cannot be used, and a store moves from plain to encrypted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from undercroft import _core
from undercroft.cli import main
from undercroft.cli.doctor import system
from undercroft.config import UndercroftConfig
from undercroft.errors import ConfigError

KEY = "0123456789abcdef" * 4
SIZES = {"host_memory": "64MiB", "disk_capacity": "32MiB"}


def key_file(place: Path, mode: int = 0o600, content: str = KEY) -> str:
    path = place / "keys"
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def check(capsys: pytest.CaptureFixture[str], options: dict[str, Any], code: int) -> str:
    assert main.main(["check-config", json.dumps(SIZES | options)]) == code
    told = capsys.readouterr()
    return told.out + told.err


@pytest.mark.parametrize(
    ("mode", "content", "said"),
    [
        (0o644, KEY, "mode 0644"),
        (0o600, KEY[1:], "line 1 is no key"),
        (0o600, "", "it has no key"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused_before_the_start(
    mode: int, content: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = {"disk_path": str(tmp_path / "store"), "key_file": key_file(tmp_path, mode, content)}
    told = check(capsys, options, 2)
    assert said in told and "allowed are" in told and options["key_file"] in told
    assert content[:-1] not in told or not content
    disks = [{"path": options["disk_path"], "capacity": 32 << 20}]
    with pytest.raises(ConfigError, match="key_file"):
        _core.Engine({"host_memory": 64 << 20, "disks": disks, "key_file": options["key_file"]})
    assert not (tmp_path / "store").exists()


def test_a_key_file_that_is_missing_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = check(capsys, {"disk_path": str(tmp_path / "store"), "key_file": str(tmp_path / "gone")}, 2)
    assert "gone cannot be read" in told


def test_io_uring_does_not_encrypt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = {"disk_path": str(tmp_path / "store"), "key_file": key_file(tmp_path), "io_engine": "io_uring"}
    assert 'allowed are "auto" and "thread_pool"' in check(capsys, options, 2)


def engine(place: Path, **options: Any) -> _core.Engine:
    disks = [{"path": str(place / "store"), "capacity": 32 << 20}]
    return _core.Engine({"host_memory": 64 << 20, "disks": disks, "socket_dir": str(place), **options})


def test_a_plain_store_is_reported_and_discarded_when_a_key_is_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine(tmp_path).close()
    options = {"disk_path": str(tmp_path / "store"), "key_file": key_file(tmp_path)}
    assert "is not encrypted, and key_file is set" in check(capsys, options, 0)
    encrypted = engine(tmp_path, key_file=options["key_file"])
    info = encrypted.info()
    assert "is not encrypted" in info["disks"][0]["notes"][0]
    assert info["io_engine"] == "thread_pool"
    assert KEY not in json.dumps(info)
    encrypted.close()
    assert _core.inspect(str(tmp_path / "store"))["format_version"] == 2
    del options["key_file"]
    assert "is encrypted, and key_file is not set" in check(capsys, options, 0)
    assert "discarded" not in check(capsys, options | {"disk_on_other_version": "set_aside"}, 0)


def test_doctor_looks_at_the_key_file(tmp_path: Path) -> None:
    def found(keys: str) -> list[tuple[str, str]]:
        given = SIZES | {"disk_path": str(tmp_path / "store"), "key_file": keys}
        return [(check.name, check.status) for check in system.stores(UndercroftConfig.parse(given, {}), "vllm")]

    good = key_file(tmp_path)
    assert found(good) == [("key file", "ok"), ("disk store", "ok")]
    assert found("") == [("disk store", "ok")]
    Path(good).chmod(0o644)
    assert found(good) == [("key file", "fail")]
