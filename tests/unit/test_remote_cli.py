"""The commands of a remote store, over a directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import interrupted
from undercroft.cli.main import main

SPACE = "0123456789abcdef" * 2
KIB = 1 << 10


def put(remote: Path, number: int, age_s: float = 1000) -> Path:
    path = remote / "1" / SPACE / f"{number:02x}" / f"{number:02x}{number:062x}-8"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(4 * KIB))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    code, out, err = run(capsys, *argv, "--json")
    assert code == 0, err
    return json.loads(out)  # type: ignore[no-any-return]


def test_gc_removes_the_oldest_until_the_rest_fits(capsys: pytest.CaptureFixture[str], remote: Path) -> None:
    paths = [put(remote, number, 10_000 - 100 * number) for number in range(8)]
    url = f"file://{remote}"
    dry = printed(capsys, "remote", "gc", url, "--max-bytes", "12KiB", "--dry-run")
    assert (dry["objects"], dry["removed_objects"], dry["dry_run"]) == (8, 5, True)
    assert all(path.exists() for path in paths)
    report = printed(capsys, "remote", "gc", url, "--max-bytes", "12KiB", "--yes")
    assert (report["removed_objects"], report["removed_bytes"]) == (5, 20 * KIB)
    assert [path.exists() for path in paths] == [False] * 5 + [True] * 3
    code, out, _ = run(capsys, "remote", "gc", url, "--max-age", "2h", "--yes")
    assert code == 0
    assert "removed: 3 objects, 12 KiB" in out


def test_gc_needs_a_limit_and_says_which_values_are_allowed(capsys: pytest.CaptureFixture[str], remote: Path) -> None:
    code, _, err = run(capsys, "remote", "gc", f"file://{remote}")
    assert code == 2
    assert "--max-bytes" in err
    with pytest.raises(SystemExit):
        main(["remote", "gc", f"file://{remote}", "--max-age", "soon"])
    assert "Allowed: seconds" in capsys.readouterr().err
    code, _, err = run(capsys, "remote", "gc", "redis://:hunter2@host", "--max-age", "1d", "--yes")
    assert code == 2
    assert "hunter2" not in err
    assert "REDIS_PASSWORD" in err


@pytest.mark.parametrize("command", [("inspect",), ("remote", "gc", "--max-age=1d", "--yes")])
def test_a_directory_that_is_missing_is_named_and_not_made(
    capsys: pytest.CaptureFixture[str], remote: Path, command: tuple[str, ...]
) -> None:
    code, _, err = run(capsys, *command, f"file://{remote}")
    assert code == 2
    assert f"file://{remote}" in err
    assert "no such directory" in err
    assert not remote.exists()


def test_gc_of_a_store_that_removes_objects_itself_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    # Nobody listens there: the store is not asked.
    code, _, err = run(capsys, "remote", "gc", "redis://127.0.0.1:1/0", "--max-bytes", "1GiB", "--dry-run")
    assert code == 2
    assert "redis://127.0.0.1:1/0" in err
    assert "maxmemory-policy" in err


def test_a_store_that_cannot_be_reached_is_named_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "inspect", "redis://127.0.0.1:1/0")
    assert code == 1
    assert "redis://127.0.0.1:1/0: the store cannot be reached" in err
    assert "check the host and the port" in err


def test_inspect_lists_the_namespaces(capsys: pytest.CaptureFixture[str], remote: Path) -> None:
    for number in range(3):
        put(remote, number, 7200)
    about = {"model": "/models/llama", "dtype": "bfloat16"}
    (remote / "1" / SPACE / "about.json").write_text(json.dumps(about))
    (remote / "notes.txt").write_text("mine")
    found = printed(capsys, "inspect", f"file://{remote}")
    assert (found["objects"], found["bytes"], found["other_objects"]) == (3, 12 * KIB, 1)
    [space] = found["namespaces"]
    assert (space["digest"], space["objects"], space["description"]) == (SPACE, 3, about)
    assert 7100 < space["oldest_s"] < 7300
    code, out, _ = run(capsys, "inspect", f"file://{remote}")
    assert code == 0
    assert SPACE[:12] in out
    for flag in (["--verify"], ["--drop", SPACE], ["--diff", SPACE, SPACE], ["--model", "some"]):
        code, _, err = run(capsys, "inspect", f"file://{remote}", *flag)
        assert code == 2, flag
        assert f"{flag[0]} is for a directory of the disk tier" in err


def test_doctor_looks_at_the_store(capsys: pytest.CaptureFixture[str], remote: Path) -> None:
    from undercroft.cli.doctor import _remote_checks

    checks = list(_remote_checks(f"file://{remote}"))
    assert [check.status for check in checks] == ["ok"] * len(checks), checks
    assert {"remote", "remote writes", "remote latency", "remote deletes", "remote lists", "remote clock"} == {
        check.name for check in checks
    }
    assert not [path for path in remote.rglob("*") if path.is_file()]
    # Nobody listens there.
    [unreachable] = _remote_checks("redis://127.0.0.1:1/0")
    assert (unreachable.name, unreachable.status) == ("remote", "fail")
    assert "cannot be reached" in unreachable.found
    assert unreachable.advice


def foreign(remote: Path) -> str:
    """Lets others write the directory. Returns the words of a message about it."""
    remote.chmod(0o777)
    if os.geteuid() != 0:
        return f"{remote} has mode 0777, with which others can write it"
    os.chown(remote, 65_534, -1)
    return f"{remote} belongs to uid 65534, this process runs as uid 0"


def test_a_directory_that_others_may_write_is_refused_with_its_path_and_the_remedy(
    capsys: pytest.CaptureFixture[str], remote: Path
) -> None:
    from undercroft import _core
    from undercroft.cli.doctor import _remote_checks

    put(remote, 1)
    url = f"file://{remote}"
    words = foreign(remote)
    [refused] = _remote_checks(url)
    assert (refused.status, words in refused.found) == ("fail", True), refused.found
    assert "chown" in refused.advice and "remote_any_owner" in refused.advice
    assert words in _core.remote_examine(url)
    commands = (["inspect", url], ["remote", "gc", url, "--max-bytes", "1", "--yes"])
    for command in commands:
        code, _, err = run(capsys, *command)
        assert (code, words in err, "remote_any_owner" in err) == (1, True, True), err
    assert {check.status for check in _remote_checks(url, any_owner=True)} == {"ok"}
    assert _core.remote_examine(url, any_owner=True) is None
    assert printed(capsys, "inspect", url, "--remote-any-owner")["objects"] == 1
    gone = printed(capsys, *commands[1], "--remote-any-owner")
    assert gone["removed_objects"] == 1


@pytest.mark.parametrize(
    ("url", "variables", "words"),
    [
        ("redis://192.0.2.1:1/0", {}, "redis://192.0.2.1:1/0: the password and the blocks are not encrypted"),
        (
            "s3://bucket/p",
            {"AWS_ENDPOINT_URL": "http://192.0.2.1:1", "AWS_ALLOW_HTTP": "true"},
            'AWS_ENDPOINT_URL is "http://192.0.2.1:1": tokens and blocks are not encrypted',
        ),
    ],
)
def test_the_start_line_names_requests_without_encryption(url: str, variables: dict[str, str], words: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    program = (
        "from undercroft import _core\nfrom undercroft.engine import start_line\n"
        f"engine = _core.Engine({{'host_memory': 1 << 24, 'disks': [], 'remote': {url!r}, 'socket_dir': ''}})\n"
        "print(start_line(engine.info(), 'x'))"
    )
    environment = {**os.environ, **keys, **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert words in done.stdout, done.stdout + done.stderr


def test_a_setting_that_accepts_any_certificate_is_refused() -> None:
    program = "from undercroft import _core\nprint(_core.remote_examine('s3://bucket/p'))"
    environment = {**os.environ, "AWS_ALLOW_INVALID_CERTIFICATES": "true"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert 'AWS_ALLOW_INVALID_CERTIFICATES is "true"' in done.stdout and "SSL_CERT_FILE" in done.stdout, done.stdout


NEVER_ENDS = """
import ctypes, sys
from undercroft import _core
from undercroft.cli import main

def never(*_, **__):
    mutex, lock = (ctypes.c_char * 64)(), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("asked", flush=True)
    lock(mutex)  # waits for ever, and signals do not end it

_core.remote_contents = _core.remote_check = never
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [["inspect"], ["doctor", "--role", "serve", "--json", "--remote"]])
def test_an_interrupt_does_not_wait_for_a_slow_store(command: list[str], remote: Path) -> None:
    interrupted.ends_at_once(["-c", NEVER_ENDS, *command, f"file://{remote}"], "asked")


def test_an_interrupted_bench_ends_soon_and_leaves_no_object(remote: Path) -> None:
    pytest.importorskip("undercroft_bench")
    # Of 8 GiB, so that the whole takes far longer.
    arguments = ["bench", "remote", f"file://{remote}", "--sizes", "1MiB", "--total", "8GiB"]
    command = [sys.executable, "-m", "undercroft.cli.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not any(path.is_file() for path in remote.rglob("*")):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(8) == 130
            assert process.stdout is not None and process.stderr is not None
            assert (process.stdout.read(), process.stderr.read()) == ("", "")
        finally:
            process.kill()
    assert not [path for path in remote.rglob("*") if path.is_file()]


def test_bench_measures_and_advises(capsys: pytest.CaptureFixture[str], remote: Path) -> None:
    pytest.importorskip("undercroft_bench")
    url = f"file://{remote}"
    found = printed(capsys, "bench", "remote", url, "--sizes", "1MiB,2MiB", "--total", "4MiB")
    assert [case["object"] for case in found["cases"]] == ["1 MiB", "2 MiB"]
    assert found["advised_remote_object"] in ("1MiB", "2MiB")
    assert found["probe_ms"] > 0
    assert not [path for path in remote.rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", ["1KiB", "1048575", "65MiB", "8GiB"])
def test_bench_refuses_sizes_that_the_option_refuses(
    capsys: pytest.CaptureFixture[str], remote: Path, size: str
) -> None:
    pytest.importorskip("undercroft_bench")
    with pytest.raises(SystemExit) as ended:
        # The total bounds the work in case of a size that is accepted.
        main(["bench", "remote", f"file://{remote}", "--sizes", f"16MiB,{size}", "--total", "1MiB"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert f"--sizes: {size}: out of range" in err
    assert "1MiB to 64MiB, as for remote_object" in err
    assert not remote.exists()
