"""The command line: its output, its exit codes, and that JSON is JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import interrupted
import undercroft
from core_values import Group
from undercroft import _core, errors
from undercroft.cli import main, output
from undercroft.cli.doctor import software, system
from undercroft.cli.doctor.check import Check
from undercroft.config import UndercroftConfig
from undercroft_bench import pending


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
    check = system.direct_io(tmp_path / "not" / "yet")
    assert check.status in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_path_that_cannot_be_written_fails() -> None:
    assert system.direct_io(Path("/proc")).status == "fail"


def test_doctor_predicts_the_use_of_a_directory_at_a_start(tmp_path: Path) -> None:
    def judged(path: Path) -> tuple[str, str]:
        (check,) = system.stores(UndercroftConfig.parse({"disk_path": str(path)}, {}), "vllm")
        return check.status, check.found

    store = tmp_path / "store"
    assert judged(store)[0] == "ok"
    assert not store.exists()
    options = {"disks": [{"path": str(store), "capacity": 64 << 20}], "host_memory": 64 << 20}
    options["socket_dir"] = str(tmp_path / "run")
    engine = _core.Engine(options)
    assert judged(store) == ("warn", f"disk_path {store} is in use by process {os.getpid()}: a vLLM that starts "
                             "now shares the engine of that process, whose options count")  # fmt: skip
    engine.close()
    assert judged(store)[0] == "ok"
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    for name in ("data", "readme.txt"):
        (foreign / name).touch()
    status, found = judged(foreign)
    assert status == "fail" and "holds no undercroft store" in found
    foreign.chmod(0o777)
    status, found = judged(foreign)
    assert status == "fail" and "mode 0777" in found
    block = bytearray((store / "super").read_bytes())
    block[8] += 2
    (store / "super").write_bytes(block)
    status, found = judged(store)
    assert status == "warn" and "are discarded" in found
    assert (store / "super").read_bytes() == block
    (store / "data").unlink()
    assert judged(store)[0] == "warn", "it is discarded, whatever is left of it"
    block[8] -= 2
    (store / "super").write_bytes(block)
    status, found = judged(store)
    assert status == "warn" and "data is missing" in found


@pytest.mark.parametrize(
    ("mount", "kind", "said"),
    [
        ("/", "tmpfs", "is in memory (tmpfs)"),
        ("/", "overlay", "container's own filesystem"),
        ("/x", "nfs4", "on the network"),
        ("/", "ext4", "no disk is mounted there"),
        ("/mnt/x", "xfs", None),
    ],
)
def test_doctor_warns_of_a_directory_on_no_disk_of_its_own(
    mount: str, kind: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_mount", lambda _path: (mount, kind))
    found = list(system.device(Path("/mnt/x/cache")))
    assert [check.status for check in found] == (["warn"] if said else [])
    assert said is None or said in found[0].found


def test_doctor_checks_the_needs_of_its_role(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    disks = [word for name in ("a", "b") for word in ("--disk-path", str(tmp_path / name))]
    code, report = run_json(capsys, "doctor", "--role", "serve", "--disk-capacity", "64MiB", *disks)
    names = [check["name"] for check in report["checks"]]
    assert code == 0
    assert not {"vLLM", "torch", "plugin"} & set(names)
    assert (names.count("disk store"), names.count("disk path")) == (2, 2)
    assert "61.5 MiB for blocks" in report["checks"][names.index("disk store")]["found"]
    assert list(tmp_path.iterdir()) == []
    code, report = run_json(capsys, "doctor", "--role", "serve", "--host-memory", "1000TiB")
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert (code, [check["name"] for check in failed]) == (1, ["host memory"])
    assert main.main(["doctor", "--host-memory", "much"]) == 2
    assert "--host-memory much" in capsys.readouterr().err


def test_doctor_prints_each_check_when_it_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(software, "core", lambda: said.append(capsys.readouterr().out) or Check("undercroft", "ok", ""))
    assert main.main(["doctor", "--role", "serve"]) == 0
    assert "memory" in said[0]


def test_a_command_loads_neither_the_others_nor_vllm() -> None:
    code = (
        "import sys; from undercroft.cli import main; main.build_parser('doctor'); "
        "found = {'vllm', 'torch', 'undercroft.cli.serve', 'undercroft.cli.doctor'} & set(sys.modules); "
        "assert found == {'undercroft.cli.doctor'}, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert output.coloured("x", "32") == "x"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.coloured("x", "32") == "\033[32mx\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.coloured("x", "32") == "x"


def test_io_uring_is_judged_by_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "probe_io_uring", lambda: None)
    assert system.io_uring().status == "ok"
    monkeypatch.setattr(_core, "probe_io_uring", lambda: "io_uring refused: reason")
    monkeypatch.setattr(system, "_read", lambda _path: "0")
    check = system.io_uring()
    assert check.status == "warn"
    assert check.found.startswith("io_uring refused: reason")
    assert "seccomp" in check.advice
    assert "Linux 5.11" in check.advice
    monkeypatch.setattr(system, "_read", lambda _path: "2")
    assert "sysctl kernel.io_uring_disabled" in system.io_uring().advice


def test_doctor_shows_the_memory_that_the_core_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, status in ((6 << 30, "ok"), (1 << 30, "warn")):
        monkeypatch.setattr(_core, "available_memory", lambda available=available: available)
        check = system.memory()
        assert check.status == status
        assert check.found.startswith(f"{available >> 30} GiB available")

    def unknown() -> int:
        raise _core.UndercroftError("the reason")

    monkeypatch.setattr(_core, "available_memory", unknown)
    assert (system.memory().status, system.memory().found) == ("warn", "the reason")


def test_doctor_reports_a_core_that_cannot_be_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "undercroft._core", None)
    monkeypatch.delattr(undercroft, "_core")
    code, report = run_json(capsys, "doctor")
    assert code == 1
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert status["undercroft"] == "fail"
    assert not {"io_uring", "memory"} & set(status)


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["inspect"], ["bench", "lookup", "--keys", "0"], ["bench", "disk", "--block-bytes", "x"]]
)
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_an_expected_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> list[Check]:
        raise output.CommandError("the reason")

    monkeypatch.setattr(system, "checks", fail)
    assert main.main(["doctor"]) == 1
    assert capsys.readouterr().err == "undercroft: error: the reason\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("undercroft: x"), 2),
        (errors.StoreError("x"), 2),
        (errors.ServerError("x"), 1),
        (errors.UndercroftError("x"), 1),
        (OSError("x"), 1),
    ],
)
def test_exit_code_2_marks_errors_that_the_operator_must_fix(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> list[Check]:
        raise error

    monkeypatch.setattr(system, "checks", fail)
    assert main.main(["doctor"]) == code
    assert capsys.readouterr().err == "undercroft: error: x\n"


def test_without_the_benchmarks_the_command_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "undercroft_bench.cli", raising=False)
    monkeypatch.setitem(sys.modules, "undercroft_bench", None)
    assert main.main(["bench", "lookup"]) == 2
    assert "pip install 'undercroft[bench]'" in capsys.readouterr().err


def test_nothing_but_the_benchmarks_loads_them() -> None:
    code = (
        "import sys; from undercroft.cli import main; main.build_parser('serve'); "
        "sys.exit('undercroft_bench' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_table_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("a", "b"), [("long cell", 1), ("x", 2.5)])
    assert capsys.readouterr().out == "a          b\nlong cell  1\nx          2.500\n"


def test_a_narrow_terminal_shows_cell_by_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(columns: int, rows: int, *, terminal: bool = True) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
        output.print_table(("tier", "capacity"), [("host", "64 MiB")] * rows)
        return capsys.readouterr().out

    wide = "tier  capacity\nhost  64 MiB\n"
    assert shown(14, 1) == wide
    assert shown(13, 1) == "tier      host\ncapacity  64 MiB\n"
    assert shown(13, 1, terminal=False) == wide
    assert shown(13, 2) == "tier      host\ncapacity  64 MiB\n\ntier      host\ncapacity  64 MiB\n"
    assert shown(13, 8).startswith(wide)


def test_bench_lookup_reports_the_fields_of_an_embedded_engine(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "bench", "lookup", "--keys", "64", "--rounds", "20")
    assert code == 0
    times = {name: value for name, value in report.items() if name.endswith(("_us", "_ns"))}
    assert set(times) == {"submit_p50_us", "submit_p99_us", "poll_p50_ns", "ready_p50_us", "ready_p99_us"}
    assert all(value > 0 for value in times.values())


def test_bench_lookup_asks_for_a_crowd_that_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "CROWD_S", 0.05)
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
    assert {"read_p50_ms", "read_p99_ms", "cpu_s_per_gb", "io_engine", "plan"} <= set(report)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_bench_recover_finds_every_block(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = run_json(capsys, "bench", "recover", "--path", str(tmp_path), "--blocks", "10000")
    assert code == 0
    assert report["blocks"] == 10_000
    assert report["bytes_read"] < 10_000 * 4096
    assert list(tmp_path.iterdir()) == []


NEVER_ENDS = """
import ctypes, pathlib, sys
from undercroft_bench import _bench
from undercroft.cli import main

def measure(directory, *_):
    pathlib.Path(directory, "store").touch()
    print("measuring", flush=True)
    mutex, libc = (ctypes.c_char * 64)(), ctypes.CDLL(None)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)  # the second waits for ever, and signals do not end it

_bench.disk = _bench.recover = measure
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["recover", "disk"])
def test_an_interrupt_ends_a_measurement_at_once_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    interrupted.ends_at_once(["-c", NEVER_ENDS, "bench", kind, "--path", str(tmp_path)], "measuring")
    assert list(tmp_path.iterdir()) == []


def _store(directory: Path) -> None:
    """A store with 20 blocks of one namespace and 10 of another, closed."""
    engine = _opened(directory)
    for name, blocks in (("one", 20), ("two", 10)):
        session = engine.register(json.dumps({"model": name}), [Group("full", 16, 8192)], 16)
        grant = session.begin_save("a", [bytes([block]) * 32 for block in range(blocks)], blocks * 16)
        assert grant is not None
        session.end_transfer(grant.transfer_id, True)
    assert engine.flush()
    engine.close()


def _opened(directory: Path) -> _core.Engine:
    return _core.Engine({"host_memory": 8 << 20, "disks": [{"path": str(directory), "capacity": 32 << 20}]})


def test_inspect_verifies_every_payload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _store(tmp_path)
    code, found = run_json(capsys, "inspect", str(tmp_path), "--verify")
    expected = {"checked": 30, "corrupt": 0, "bytes": 30 * 8192, "corrupt_blocks": [], "used_by": None}
    assert (code, found["verify"]) == (0, expected)
    with (tmp_path / "data").open("r+b") as file:
        file.write(b"not what was saved")
    code, found = run_json(capsys, "inspect", str(tmp_path), "--verify")
    assert (code, found["verify"]["corrupt"]) == (1, 1)
    assert main.main(["inspect", str(tmp_path), "--verify"]) == 1
    said = capsys.readouterr().out
    assert "verified 30 blocks, 240 KiB: 1 corrupt" in said
    assert "8 KiB at offset 0 of the data file" in said


def test_inspect_drops_one_namespace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _store(tmp_path)
    _, before = run_json(capsys, "inspect", str(tmp_path))
    blocks = {space["description"]["model"]: space["blocks"] for space in before["namespaces"]}
    assert blocks == {"one": 20, "two": 10}
    digest = next(space["digest"] for space in before["namespaces"] if space["blocks"] == 20)
    code, after = run_json(capsys, "inspect", str(tmp_path), "--drop", digest[:12], "--yes")
    assert (code, after["dropped_namespaces"]) == (0, 1)
    assert [space["blocks"] for space in after["namespaces"]] == [10]
    engine = _opened(tmp_path)
    assert engine.info()["blocks_recovered"] == 10
    # While an engine uses the directory, no namespace is removed.
    assert main.main(["inspect", str(tmp_path), "--drop", after["namespaces"][0]["digest"], "--yes"]) == 2
    assert "in use" in capsys.readouterr().err
    engine.close()
    for wrong, why, code in ((digest, "no namespace", 1), ("12", "at least 8", 2)):
        assert main.main(["inspect", str(tmp_path), "--drop", wrong, "--yes"]) == code
        assert why in capsys.readouterr().err


def test_inspect_says_when_and_whether_a_namespace_is_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    from undercroft.identity.weights import Digests, weights_digest

    engine = _opened(store)
    for pages, weights in ((2, weights_digest(model, Digests(), "sampled")), (2, "other"), ("vllm 0.1", "other")):
        text = json.dumps({"model": {"weights": weights}, "hash": {"scheme": 1}, "pages": pages})
        engine.register(text, [Group("full", 16, 8192)], 16)
    assert engine.flush()
    engine.close()
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.32.1")

    def found(*arguments: str) -> list[str]:
        _, shown = run_json(capsys, "inspect", str(store), *arguments)
        assert all(space["last_use_s"] < 100 and space["newest_s"] is None for space in shown["namespaces"])
        return sorted(space["found"] for space in shown["namespaces"])

    assert found() == ["no: pages", "yes", "yes"]
    assert found("--model", str(model)) == ["no: pages", "no: weights", "yes"]
    assert main.main(["inspect", str(store)]) == 0
    header = capsys.readouterr().out.splitlines()[3].split("  ")
    assert [name.strip() for name in header if name.strip()][-2:] == ["last use", "found"]
    assert main.main(["inspect", str(store), "--model", str(store)]) == 1
    assert "no weights are there" in capsys.readouterr().err


def test_inspect_compares_namespaces_and_names_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(tmp_path)
    _, found = run_json(capsys, "inspect", str(tmp_path))
    one, two = (space["digest"] for space in sorted(found["namespaces"], key=lambda space: -space["blocks"]))
    assert main.main(["inspect", str(tmp_path), "--diff", one[:12], two[:12]]) == 0
    assert capsys.readouterr().out == f"model one, in {two[:12]} two\n"
    assert main.main(["inspect", str(tmp_path), "--diff", one, one]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main.main(["inspect", str(tmp_path), "--diff", "", two]) == 1
    assert "start of 2 namespaces" in capsys.readouterr().err
    # Asked on a terminal, and refused.
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "")
    assert main.main(["inspect", str(tmp_path), "--drop", one]) == 1
    assert asked == [f"Remove {one[:12]} (? one): 20 blocks, 160 KiB? [y/N] "]
    assert main.main(["inspect", str(tmp_path), "--drop", one, "--yes"]) == 0
    assert len(asked) == 1
    capsys.readouterr()
    _, left = run_json(capsys, "inspect", str(tmp_path))
    assert [space["digest"] for space in left["namespaces"]] == [two]


def test_a_refused_argument_of_the_core_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["bench", "disk", "--path", str(tmp_path), "--block-bytes", "1000"]) == 1
    assert "block_bytes is 1000" in capsys.readouterr().err


def test_the_version_names_the_build(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"undercroft {undercroft.__version__} (")
    assert re.search(r"\((?:release|debug), \w+-linux, commit \w+\)$", shown.strip())


def test_the_version_is_printed_without_a_core(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "undercroft._core", None)
    monkeypatch.delattr(undercroft, "_core", raising=False)
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert "the core cannot be loaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench", "disk", "--block-bytes", "0"], "above 0"),
        (["bench", "disk", "--block-bytes", "1XB"], "Allowed: bytes as a number, or with a unit"),
        (["bench", "lookup", "--keys", "abc"], "abc is not a whole number from 1 to"),
        (["bench", "copy", "--block-bytes", "4"], "less than a byte for each of 32 layers; give more"),
        (["check-config", '{"disk_admission": "ALL"}'], "did you mean 'all'?"),
    ],
)
def test_a_wrong_value_is_refused_with_the_allowed_ones(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main.main(argv)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_inspect_says_that_a_directory_holds_no_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["inspect", str(tmp_path)]) == 2
    assert "holds no undercroft cache" in capsys.readouterr().err
