"""A real `undercroft serve` process: start, status, metrics, signals, and the error of a second one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from core_values import Group
from serve_process import COMMAND, ServeProcess, run
from served_client import until
from undercroft import _core

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[ServeProcess]:
    """One server for the tests that leave it as it is."""
    disk = ["--disk-path", str(place / "disk"), "--disk-capacity", "64MiB"]
    with ServeProcess(place / "run" / "serve.sock", *disk, "--metrics", "0") as server:
        yield server


def scrape(server: ServeProcess) -> str:
    with urllib.request.urlopen(server.printed[1].split()[-1], timeout=10) as answer:
        return answer.read().decode()


def parts(line: str) -> tuple[datetime, str, str]:
    """Time, level and message of a line of the log."""
    day, clock, level, message = line.rstrip("\n").split(" ", 3)
    return datetime.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S,%f"), level, message


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_serve_logs_its_configuration_and_its_addresses(server: ServeProcess, place: Path) -> None:
    times, levels, (start, metrics, ready) = zip(*map(parts, server.printed), strict=True)
    assert levels == ("INFO",) * 3 and list(times) == sorted(times)
    assert start.startswith("undercroft: host memory 64 MiB")
    assert f"disk {place}/disk 61.5 MiB" in start
    assert re.fullmatch(r"undercroft: metrics on http://127\.0\.0\.1:\d+/metrics", metrics)
    assert ready == f"undercroft: ready on unix://{server.socket}"


def test_a_file_gives_the_options_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    options = {"disk_path": [str(tmp_path / "a:b")], "disk_capacity": "64MiB", "host_memory": "1GiB", "io_depth": 8}
    file.write_text(json.dumps(options | {"metrics": 0, "log_level": "error", "socket": str(tmp_path / "other")}))
    with ServeProcess(
        tmp_path / "s.sock", "--config", str(file), "--log-level", "info", UNDERCROFT_IO_DEPTH="9"
    ) as one:
        assert "undercroft: metrics on http://127.0.0.1:" in one.printed[1]
        given = one.status()["info"]["options"]
        assert (given["host_memory"], given["io_depth"]) == (64 << 20, 8)
        assert [disk["path"] for disk in given["disks"]] == [str(tmp_path / "a:b")]


def test_an_order_leaves_a_line_and_a_count(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "serve.sock", "--metrics", "0") as server:
        assert 'vllm:undercroft_orders_total{verb="clear"} 0.0' in scrape(server)
        with subprocess.Popen(
            [*COMMAND, "clear", "--socket", str(server.socket), "--older-than", "2h", "--yes"],
            stdout=subprocess.DEVNULL,
        ) as caller:
            assert caller.wait(60) == 0
        _, level, line = parts(server.process.stdout.readline())
        order = 'undercroft: order clear {"erase":false,"what":{"older_than":7200}} by '
        who = f"uid {os.getuid()}, pid {caller.pid}: " + '{"disk_blocks":0'
        assert (level, line.startswith(order + who)) == ("INFO", True), line
        assert run("status", "--socket", str(server.socket)).returncode == 0
        assert 'vllm:undercroft_orders_total{verb="clear"} 1.0' in scrape(server)
        assert server.stop() == 0
        assert parts(server.process.stdout.read())[2] == "undercroft: stopping", "questions leave no line"


def test_only_its_user_can_come_near_the_socket(server: ServeProcess) -> None:
    assert stat.S_ISSOCK(server.socket.stat().st_mode)
    assert (mode(server.socket), mode(server.socket.parent)) == (0o600, 0o700)


CONNECT_AS_NOBODY = """
import os, socket, sys
os.chdir(sys.argv[1])
os.setresuid(65534, 65534, 65534)
with socket.socket(socket.AF_UNIX) as other:
    other.settimeout(30)
    other.connect(sys.argv[2])
    print(other.recv(1))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_files_let_him_in(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "run" / "serve.sock") as server:
        server.socket.parent.chmod(0o755)
        server.socket.chmod(0o666)
        command = [sys.executable, "-c", CONNECT_AS_NOBODY, str(server.socket.parent), server.socket.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "b''\n", "the connection is closed without a word"
        assert server.status()["server"]["refused"] == 1


def test_status_answers(server: ServeProcess) -> None:
    done = run("status", "--json", "--socket", str(server.socket))
    assert (done.returncode, done.stderr) == (0, "")
    status = json.loads(done.stdout)
    assert (status["pid"], status["socket"]) == (server.process.pid, str(server.socket))
    assert status["stats"]["host_capacity_bytes"] == 64 << 20
    assert status["info"]["disks"][0]["health"] == "good"
    assert status["sessions"] == []
    assert status["rates"]["disk_read_bytes"] == 0
    shown = run("status", "--socket", str(server.socket))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "64 MiB" in shown.stdout


def test_metrics_can_be_scraped(server: ServeProcess) -> None:
    text = scrape(server)
    assert 'vllm:undercroft_capacity_bytes{tier="host"} 6.7108864e+07' in text
    assert "vllm:undercroft_connections 1.0" in text


def test_serve_reports_a_deleted_file(tmp_path: Path) -> None:
    disk = ["--disk-path", str(tmp_path / "disk"), "--disk-capacity", "64MiB"]
    with ServeProcess(tmp_path / "run" / "serve.sock", *disk, "--metrics", "0") as server:
        (tmp_path / "disk" / "data").unlink()
        assert "data was deleted" in run("status", "--socket", str(server.socket)).stdout
        assert server.status()["stats"]["disk_degraded"] == 1
        assert "vllm:undercroft_degraded_disks 1.0" in scrape(server)
        _, level, said = parts(server.process.stdout.readline())
        assert (level, str(tmp_path / "disk") in said) == ("ERROR", True), "the log says so, too"


def test_a_second_server_on_the_socket_is_refused(server: ServeProcess, place: Path) -> None:
    second = run("serve", "--socket", str(server.socket), "--host-memory", "64MiB")
    assert (second.returncode, second.stdout, second.stderr.count("\n")) == (2, "", 1)
    assert f"socket: {str(server.socket)!r}".replace("'", '"') in second.stderr
    assert server.status()["pid"] == server.process.pid, "the first one is still there"


def test_a_directory_in_use_is_refused_with_its_owner(server: ServeProcess, place: Path) -> None:
    disk = ["--disk-path", str(place / "disk"), "--disk-capacity", "64MiB"]
    second = run("serve", "--socket", str(place / "other.sock"), "--host-memory", "64MiB", *disk)
    assert (second.returncode, second.stdout) == (2, "")
    assert str(server.process.pid) in second.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--socket", "PLACE/run/" + "s" * 120], "socket: path "),
        (["--disk-capacity", "8MiB"], "disk_capacity 8 MiB for "),
        (["--disk-path", "FOREIGN"], "holds no undercroft store (found holiday.jpg)"),
        (["--host-memory", "9000TiB"], "host_memory = 9000 TiB is more than the "),
    ],
)
def test_a_flag_that_the_operator_must_change_is_exit_code_2_and_named_as_written(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    """As deploy/undercroft.service relies on: systemd does not start it again."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "holiday.jpg").touch()
    defaults = {
        "--socket": str(tmp_path / "run" / "serve.sock"),
        "--host-memory": "64MiB",
        "--disk-path": str(tmp_path / "disk"),
        "--disk-capacity": "64MiB",
    }
    given = defaults | {flags[0]: flags[1].replace("FOREIGN", str(foreign)).replace("PLACE", str(tmp_path))}
    done = run("serve", *(part for pair in given.items() for part in pair))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr
    assert "runtime_dir" not in done.stderr
    assert not re.search(r"\d{7}", done.stderr), "sizes have the units in which they were given"


def test_a_server_that_serves_is_healthy_over_http(server: ServeProcess) -> None:
    (address,) = [line.partition("http://")[2].partition("/")[0] for line in server.printed if "metrics on" in line]
    with urllib.request.urlopen(f"http://{address}/health", timeout=30) as answer:
        assert (answer.status, answer.read()) == (200, b"serves\n")


def test_a_metrics_port_in_use_is_refused(server: ServeProcess, tmp_path: Path) -> None:
    port = server.printed[1].rpartition(":")[2].partition("/")[0]
    second = run("serve", "--socket", str(tmp_path / "s"), "--host-memory", "64MiB", "--metrics", port)
    assert second.returncode == 1
    assert f"metrics on 127.0.0.1 port {port}: Address already in use" in second.stderr
    assert "ready" not in second.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    disk = tmp_path / "disk"
    with ServeProcess(tmp_path / "serve.sock", "--disk-path", str(disk), UNDERCROFT_DISK_CAPACITY="64MiB") as server:
        assert server.stop(number) == 0
        assert parts(server.process.stdout.read())[1:] == ("INFO", "undercroft: stopping")
        assert server.process.stderr.read() == ""
    engine = _core.Engine(
        {"host_memory": 64 << 20, "disks": [{"path": str(disk), "capacity": 64 << 20}], "socket_dir": str(tmp_path)}
    )
    engine.close()
    gone = run("status", "--socket", str(server.socket))
    assert (gone.returncode, gone.stdout, gone.stderr.count("\n")) == (1, "", 1)
    assert str(server.socket) in gone.stderr


def test_the_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "serve.sock") as server:
        server.process.kill()
    with ServeProcess(tmp_path / "serve.sock") as server:
        assert server.status()["pid"] == server.process.pid


def test_a_frozen_server_is_distinguished_from_a_running_one(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "serve.sock") as server:
        os.kill(server.process.pid, signal.SIGSTOP)
        frozen = run("status", "--socket", str(server.socket))
        assert (frozen.returncode, frozen.stdout, frozen.stderr.count("\n")) == (1, "", 1)
        os.kill(server.process.pid, signal.SIGCONT)
        assert server.status()["pid"] == server.process.pid


def test_it_serves_over_the_borders_of_containers(tmp_path: Path) -> None:
    """Where it is process 1 and sees no process of its clients."""
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    with ServeProcess(tmp_path / "serve.sock", prefix=container) as server:
        assert server.status()["pid"] == 1
        engine = _core.Engine({"server": f"unix://{server.socket}"})
        engine.register("{}", [Group("full", 16, 4096)], 16)
        until("up", lambda: engine.connection() == ("up", ""))
        assert _core.Arena.attach(str(server.socket), engine.arena.session).size == 64 << 20
        engine.close()


def test_one_process_does_not_take_all_connections(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "run" / "serve.sock") as server:
        held = []
        try:
            for _ in range(100):
                held.append(socket.socket(socket.AF_UNIX))
                held[-1].settimeout(30)
                held[-1].connect(str(server.socket))
            assert held[-1].recv(1) == b"", "closed at once"
            answer = json.loads(run("status", "--socket", str(server.socket), "--json").stdout)
            assert answer["server"]["connections"] <= 33
        finally:
            for connection in held:
                connection.close()


def test_the_server_raises_its_limit_of_descriptors(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with ServeProcess(tmp_path / "run" / "serve.sock", prefix=["prlimit", f"--nofile=256:{hard}"]) as server:
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == hard


def test_a_server_continues_after_it_was_short_of_descriptors(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "run" / "serve.sock") as server, socket.socket(socket.AF_UNIX) as held:
        pid, limits = server.process.pid, resource.getrlimit(resource.RLIMIT_NOFILE)
        held.connect(str(server.socket))
        until("it is open", lambda: server.status()["server"]["connections"] == 2)
        # poll() itself fails with fewer than it is asked about.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (2, limits[1]))
        for _ in range(50):
            with socket.socket(socket.AF_UNIX) as other, contextlib.suppress(OSError):
                other.settimeout(0.01)
                other.connect(str(server.socket))
                other.recv(1)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert server.status()["pid"] == pid


def may_mount() -> bool:
    """Whether this process may make a namespace of mounts."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs root, to mount a filesystem")
def test_a_directory_whose_filesystem_is_unmounted_is_not_good(tmp_path: Path) -> None:
    place = tmp_path / "mount"
    place.mkdir()
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=96m none {place} && exec "$@"', "sh"]
    disk = ["--disk-path", str(place / "cache"), "--disk-capacity", "64MiB"]
    with ServeProcess(tmp_path / "s", *disk, prefix=mount) as server:

        def health() -> str:
            (found,) = server.status()["info"]["disks"]
            return found["health"]

        assert health() == "good"
        enter = ["nsenter", "--mount", "--target", str(server.process.pid)]
        subprocess.run([*enter, "umount", "--lazy", str(place)], check=True)
        until("the directory is reported", lambda: health() == "file_missing")
        (found,) = server.status()["info"]["disks"]
        assert found["fault"] == "its filesystem was unmounted while it was in use (umount -l)"
        assert server.stop() == 0
