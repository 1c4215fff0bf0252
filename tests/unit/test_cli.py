"""The command line: what it prints, its exit codes, and that JSON is JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from undercroft import _core
from undercroft.cli import bench_pending, doctor_system, main, output
from undercroft.cli.doctor import Check


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    code = main.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_reports_every_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = run_json(capsys, "doctor", "--disk-path", str(tmp_path))
    names = [check["name"] for check in report["checks"]]
    assert {"io_uring", "memlock", "huge pages", "memory", "disk path", "undercroft", "vLLM", "torch"} <= set(names)
    assert report["ok"] == all(check["status"] != "fail" for check in report["checks"])
    assert code == (0 if report["ok"] else 1)
    assert all(check["advice"] for check in report["checks"] if check["status"] != "ok")


def test_doctor_fails_on_a_path_that_is_no_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert main.main(["doctor", "--disk-path", str(tmp_path / "file")]) == 1
    assert "not a directory" in capsys.readouterr().out


def test_a_missing_disk_path_is_judged_by_its_parent(tmp_path: Path) -> None:
    check = doctor_system.direct_io(tmp_path / "not" / "yet")
    assert check.status in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_path_that_cannot_be_written_fails() -> None:
    assert doctor_system.direct_io(Path("/proc")).status == "fail"


def test_doctor_names_the_files_that_a_store_lacks(tmp_path: Path) -> None:
    assert doctor_system.store_files(tmp_path) == []
    for name in doctor_system.STORE_FILES:
        (tmp_path / name).touch()
    assert [check.status for check in doctor_system.store_files(tmp_path)] == ["ok"]
    (tmp_path / "data").unlink()
    (check,) = doctor_system.store_files(tmp_path)
    assert (check.status, "lacks data" in check.found) == ("fail", True)


def test_io_uring_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def syscall(self, *_: object) -> int:
            import ctypes
            import errno

            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: Refusing())
    monkeypatch.setattr(doctor_system, "_read", lambda _path: "0")
    check = doctor_system.io_uring()
    assert check.status == "warn"
    assert "seccomp" in check.advice


@pytest.mark.parametrize(
    ("limit", "used", "found"),
    [("max", "5", "100.0 GiB available"), (str(8 << 30), str(2 << 30), "6.0 GiB available within")],
)
def test_memory_counts_the_cgroup_in(monkeypatch: pytest.MonkeyPatch, limit: str, used: str, found: str) -> None:
    files = {
        "/proc/meminfo": f"MemAvailable: {100 << 20} kB",
        "/sys/fs/cgroup/memory.max": limit,
        "/sys/fs/cgroup/memory.current": used,
    }
    monkeypatch.setattr(doctor_system, "_read", lambda path: files.get(path, ""))
    check = doctor_system.memory()
    assert check.status == "ok"
    assert check.found.startswith(found)


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["inspect"], ["bench", "lookup", "--keys", "0"], ["bench", "disk", "--block-bytes", "x"]]
)
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_an_expected_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_path: str | None) -> list[Check]:
        raise output.CommandError("the reason")

    monkeypatch.setattr(doctor_system, "checks", fail)
    assert main.main(["doctor"]) == 1
    assert capsys.readouterr().err == "undercroft: error: the reason\n"


def test_table_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("a", "b"), [("long cell", 1), ("x", 2.5)])
    assert capsys.readouterr().out == "a          b\nlong cell  1\nx          2.500\n"


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (1 << 52, "4096.0 TiB")]
)
def test_sizes(size: int, shown: str) -> None:
    assert output.bytes_text(size) == shown


def test_bench_lookup_reports_the_fields_of_an_embedded_engine(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "bench", "lookup", "--keys", "64", "--rounds", "20")
    assert code == 0
    times = {name: value for name, value in report.items() if name.endswith(("_us", "_ns"))}
    assert set(times) == {"submit_p50_us", "submit_p99_us", "poll_p50_ns", "ready_p50_us", "ready_p99_us"}
    assert all(value > 0 for value in times.values())


def test_bench_lookup_asks_for_a_crowd_that_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_pending, "CROWD_S", 0.05)
    code, report = run_json(capsys, "bench", "lookup", "--mode", "embedded", "--pending", "8")
    assert code == 0
    assert report["pending"] == 8
    assert 0 < report["step_ms"] <= report["step_p99_ms"]


def test_bench_disk_measures_below_the_directory_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").touch()
    arguments = ["--block-bytes", "64KiB", "--blocks", "16", "--depth", "4"]
    code, report = run_json(capsys, "bench", "disk", "--path", str(tmp_path), *arguments)
    assert code == 0
    assert {"write_gbps", "read_gbps", "raw_write_gbps", "raw_read_gbps", "write_share", "read_share"} <= set(report)
    assert {"read_p50_ms", "read_p99_ms", "cpu_s_per_gb", "io_engine"} <= set(report)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_bench_recover_finds_every_block(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = run_json(capsys, "bench", "recover", "--path", str(tmp_path), "--blocks", "10000")
    assert code == 0
    assert report["blocks"] == 10_000
    assert report["bytes_read"] < 10_000 * 4096
    assert list(tmp_path.iterdir()) == []


def _store(directory: Path) -> None:
    """A store with 20 blocks of one namespace and 10 of another, closed."""
    engine = _core.Engine(host_memory=8 << 20, disks=[(str(directory), 32 << 20)])
    for name, blocks in (("one", 20), ("two", 10)):
        session = engine.register(json.dumps({"model": name}), [("full", 16, 8192, 0)], 16)
        session.begin_save("a", [bytes([block]) * 32 for block in range(blocks)], blocks * 16)
        [(_, job, _, _, _)] = session.grants()
        session.end_save(job, True)
    assert engine.flush()
    engine.close()


def test_inspect_verifies_every_payload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _store(tmp_path)
    code, found = run_json(capsys, "inspect", str(tmp_path), "--verify")
    assert (code, found["verify"]) == (0, {"checked": 30, "corrupt": 0, "bytes": 30 * 8192})
    with (tmp_path / "data").open("r+b") as file:
        file.write(b"not what was saved")
    code, found = run_json(capsys, "inspect", str(tmp_path), "--verify")
    assert (code, found["verify"]["corrupt"]) == (1, 1)
    assert main.main(["inspect", str(tmp_path), "--verify"]) == 1
    assert "verified 30 blocks, 240.0 KiB: 1 corrupt" in capsys.readouterr().out


def test_inspect_drops_one_namespace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _store(tmp_path)
    _, before = run_json(capsys, "inspect", str(tmp_path))
    blocks = {json.loads(space["description"])["model"]: space["blocks"] for space in before["namespaces"]}
    assert blocks == {"one": 20, "two": 10}
    digest = next(space["digest"] for space in before["namespaces"] if space["blocks"] == 20)
    code, after = run_json(capsys, "inspect", str(tmp_path), "--drop", digest[:12])
    assert (code, after["dropped_namespaces"]) == (0, 1)
    assert [space["blocks"] for space in after["namespaces"]] == [10]
    engine = _core.Engine(host_memory=8 << 20, disks=[(str(tmp_path), 32 << 20)])
    assert engine.info()["blocks_recovered"] == 10
    # While somebody uses it, nothing is removed.
    assert main.main(["inspect", str(tmp_path), "--drop", after["namespaces"][0]["digest"]]) == 1
    assert "in use" in capsys.readouterr().err
    engine.close()
    for wrong, why in ((digest, "no namespace"), ("12", "at least 8")):
        assert main.main(["inspect", str(tmp_path), "--drop", wrong]) == 1
        assert why in capsys.readouterr().err


def test_a_refused_argument_of_the_core_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["bench", "disk", "--path", str(tmp_path), "--block-bytes", "1000"]) == 1
    assert "block_bytes is 1000" in capsys.readouterr().err
