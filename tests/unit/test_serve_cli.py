"""`undercroft serve` and `undercroft status` without a server: arguments, output, metrics."""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from served_client import until
from undercroft import _core, errors, exporter
from undercroft.cli import main, serve, status
from undercroft.config import OPTIONS, UndercroftConfig
from undercroft.log import logger
from undercroft.units import Amount

LATENCY = {
    "limits_s": [0.001, 0.003, 0.01],
    "load": {"at_most": [60, 99, 99, 100], "seconds": 0.2},
    "save": {"at_most": [0, 0, 0, 2], "seconds": 9.0},
}
STATUS = {
    "version": "1.2.3",
    "pid": 77,
    "uptime_s": 100.0,
    "socket": "/run/undercroft/serve.sock",
    "stats": {
        "host_capacity_bytes": 64 << 30,
        "host_used_bytes": 16 << 30,
        "host_blocks": 1000,
        "host_evictions": 5,
        "disk_capacity_bytes": 1 << 40,
        "disk_used_bytes": 1 << 39,
        "disk_blocks": 5000,
        "disk_evictions": 6,
        "disk_degraded": 1,
        "active_lookups": 3,
        "loads": 1,
        "saves": 2,
        "sessions": 1,
        "promotion_queue_bytes": 4 << 20,
        "disk_read_bytes": 10 << 20,
        "disk_write_bytes": 20 << 20,
        "saved_blocks": 40,
        "checksum_failures": 9,
    },
    "info": {
        "io_engine": "io_uring",
        "disks": [
            {"path": "/a", "capacity": 1 << 39, "health": "good", "fault": None, "latency": LATENCY},
            {
                "path": "/b",
                "capacity": 1 << 39,
                "health": "no_writes",
                "fault": "No space left on device",
                "latency": {**LATENCY, "load": LATENCY["save"], "save": {"at_most": [0, 0, 0, 0], "seconds": 0.0}},
            },
        ],
    },
    "sessions": [
        {
            "namespace": "ab" * 32,
            "connected": True,
            "workers": 2,
            "lookups": 3,
            "pending": 1,
            "loads": 1,
            "saves": 2,
            "load_bytes": 1 << 20,
            "save_bytes": 3 << 20,
            "request_bytes": 5 << 20,
            "held_bytes": 4 << 20,
            "answered": 70,
            "hits": 30,
            "loaded_bytes": 7 << 20,
            "saved_bytes": 9 << 20,
            "host_bytes": 11 << 20,
            "disk_bytes": 13 << 20,
            "tenant_share": 0.3,
        }
    ],
    "server": {"connections": 4, "workers": 2, "refused": 0, "malformed": 0, "lookups": 500, "descriptors": 21},
}


def later(seconds: float = 2.0, **server: int) -> dict:
    """The same server some time afterwards, with 8 MiB read and 100 lookups more."""
    reading = copy.deepcopy(STATUS)
    reading["uptime_s"] += seconds
    reading["stats"]["disk_read_bytes"] += 8 << 20
    reading["server"]["lookups"] += 100
    reading["sessions"][0]["answered"] += 100
    reading["server"] |= server
    return reading


def test_a_server_needs_no_vllm() -> None:
    code = "import sys, undercroft.cli.main, undercroft.exporter; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def flags(*argv: str) -> argparse.Namespace:
    return main.build_parser().parse_args(["serve", *argv])


def test_each_flag_is_an_option_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS:
        assert (f"{option.flag} " in shown) == (option.scope == "engine")
        assert (" ".join(option.help.split()) in shown) == (option.scope == "engine")


def test_flags_win_over_the_environment() -> None:
    given = {"disk_path": ["/a", "/b"], "disk_capacity": "1TiB", "io_depth": "8"}
    environ = {"UNDERCROFT_IO_DEPTH": "16", "UNDERCROFT_HOST_MEMORY": "1GiB"}
    config = UndercroftConfig.parse({}, environ, flags=given)
    assert (config.disk_path, config.disk_capacity) == (("/a", "/b"), Amount(size=1 << 40))
    assert (config.io_depth, config.host_memory) == (8, Amount(size=1 << 30))


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts in spite of wrong options would serve for ever."""

    def start(*_: object) -> None:
        raise AssertionError("the server starts")

    monkeypatch.setattr(serve, "open_engine", start)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ('{"host_memroy": "1GiB"}', ["unknown option 'host_memroy' (did you mean 'host_memory'?)", "log_level"]),
        ('{"lookup": "blocking"}', ["lookup is an option of each vLLM, not of the server"]),
        ('{"host_memory": "12XB"}', ["host_memory = '12XB' in FILE: unknown unit 'XB'. Allowed: bytes"]),
        ('{"log_level": "Info"}', ["log_level = 'Info' in FILE: Info is no level (did you mean 'info'?)"]),
        ('{"log_format": "jsno"}', ["log_format = 'jsno' in FILE: jsno is no format (did you mean 'json'?)"]),
        ('{"metrics": ":9400"}', ["metrics = ':9400' in FILE: ':9400' names no host"]),
        ('["host_memory"]', ["--config FILE: it is not a JSON object"]),
        ("host_memory: 1GiB", ["--config FILE: it is not JSON"]),
        (None, ["--config FILE: cannot be read (No such file or directory)"]),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(
    text: str | None, messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.json"
    if text is not None:
        file.write_text(text)
    assert main.main(["serve", "--config", str(file), "--socket", str(tmp_path / "s")]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    for message in messages:
        assert message.replace("FILE", str(file)) in printed.err


def test_the_file_has_the_options_of_the_command_line() -> None:
    shown = {action.dest for action in main.build_parser()._subparsers._group_actions[0].choices["serve"]._actions}
    assert shown - {"help", "config"} == {*serve._OWN_OPTIONS, *(option.name for option in serve.ENGINE_OPTIONS)}


def test_disk_path_may_be_given_several_times() -> None:
    assert flags("--disk-path", "/a", "--disk-path", "/b").disk_path == ["/a", "/b"]


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--host-memory", "12XB"], "undercroft: error: --host-memory 12XB: unknown unit 'XB'. Allowed: bytes"),
        (["--io-depth", "many"], "undercroft: error: --io-depth many: not a number. Allowed: 1 to 1024."),
        (["--disk-admission", "al"], "(did you mean 'all'?)"),
        (["--disk-capacity", "1GiB"], "without a disk_path"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_flag(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["serve", *argv]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert message in printed.err


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("127.0.0.1:9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:9400", ("::1", 9400)),
    ],
)
def test_metrics_are_on_loopback_unless_another_address_is_given(text: str, address: tuple[str, int]) -> None:
    assert flags("--metrics", text).metrics == address


@pytest.mark.parametrize("text", [":9400", "host", "host:", "1:x", "65536", "-1", "9400 ", "٣"])
def test_a_wrong_address_is_wrong_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        flags(f"--metrics={text}")
    assert ended.value.code == 2
    assert repr(text) in capsys.readouterr().err


def test_the_default_socket_is_where_the_user_has_runtime_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/5")
    assert serve.default_socket() == "/run/user/5/undercroft/serve.sock"
    for nowhere in (lambda: monkeypatch.setenv("XDG_RUNTIME_DIR", ""), lambda: monkeypatch.delenv("XDG_RUNTIME_DIR")):
        nowhere()
        monkeypatch.setenv("TMPDIR", "/somewhere")
        assert serve.default_socket() == f"/somewhere/undercroft-{os.getuid()}/serve.sock"


def test_status_asks_where_the_server_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    asked: list[str] = []

    def answer(socket: str, _timeout_s: float) -> dict:
        asked.append(socket)
        raise errors.ServerError("nobody")

    monkeypatch.setattr(_core, "server_status", answer)
    listens = Path(serve.default_socket())
    listens.parent.mkdir(parents=True)
    listens.touch()
    assert main.main(["status"]) == 1
    # The gauges of a connector of another test may ask, too.
    assert str(listens) in asked


def test_the_service_manager_is_notified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    abstract = f"undercroft-{tmp_path.name}"
    for named, bound in ((str(tmp_path / "notify"), str(tmp_path / "notify")), (f"@{abstract}", f"\0{abstract}")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(10)
            manager.bind(bound)
            monkeypatch.setenv("NOTIFY_SOCKET", named)
            serve.notify("READY=1")
            assert manager.recv(100) == b"READY=1"
    monkeypatch.delenv("NOTIFY_SOCKET")
    serve.notify("READY=1")


def test_a_service_manager_that_is_not_there_is_named_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = str(tmp_path / "absent")
    monkeypatch.setenv("NOTIFY_SOCKET", absent)
    logger.addHandler(caplog.handler)
    try:
        serve.notify("READY=1")
    finally:
        logger.removeHandler(caplog.handler)
    assert f"cannot send READY=1 to NOTIFY_SOCKET {absent}" in caplog.text


def test_the_socket_replaces_no_other_file_and_lies_in_no_open_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "notes"
    file.write_text("dear diary")
    assert main.main(["serve", "--host-memory", "64MiB", "--socket", str(file)]) == 2
    assert f"--socket {file}: there is something that is no socket" in capsys.readouterr().err
    assert file.read_text() == "dear diary"
    tmp_path.chmod(0o755)
    assert main.main(["serve", "--host-memory", "64MiB", "--socket", str(tmp_path / "s")]) == 2
    assert f"{tmp_path} is open to other users" in capsys.readouterr().err


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict | Exception]:
    """The server's answers, one after the other; time passes at once, and the last answer is an interrupt."""
    answers: list[dict | Exception] = []
    asker = threading.current_thread()

    def answer(_socket: str, timeout_s: float) -> dict:
        if threading.current_thread() is not asker:
            raise errors.UndercroftError("the gauges of a connector of another test ask, too")
        assert 0 < timeout_s <= 5
        if not answers:
            raise KeyboardInterrupt
        reading = answers.pop(0)
        if isinstance(reading, Exception):
            raise reading
        return reading

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(_core, "server_status", answer, raising=False)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    return answers


def test_status_shows_sessions_jobs_tiers_rates_and_health(
    readings: list[dict | Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    readings += [STATUS, later()]
    assert main.main(["status", "--socket", "/run/undercroft/serve.sock"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "undercroft 1.2.3, pid 77, up 1.7 min, unix:///run/undercroft/serve.sock",
        "170 requests answered, 4 connections, 2 workers, 21 open files",
        "under way: 3 lookups, 1 load, 2 saves, 4 MiB to be read from disk",
        "trouble: 9 checksum failures",
        "",
        "tier used capacity blocks evictions",
        "host 16 GiB 64 GiB 1000 5",
        "disk 512 GiB 1 TiB 5000 6",
        "",
        "disk capacity health reads p50 reads p99 writes p50 writes p99 trouble",
        "/a 512 GiB good <= 1 ms <= 3 ms > 0.01 s > 0.01 s",
        "/b 512 GiB no_writes > 0.01 s > 0.01 s - - No space left on device",
        "",
        "session connected workers answered hits loaded saved lookups now pending loads saves request memory held "
        "in host memory on disk share",
        "abababababab yes 2 170 30 7 MiB 9 MiB 3 1 1 2 5 MiB 4 MiB 11 MiB 13 MiB 0.300",
        "",
        "rates: 50.0 lookups/s, 0.0 blocks saved/s, disk 4 MiB/s read, 0 B/s written",
    ]


def test_refused_and_malformed_are_shown_when_there_are_some(
    readings: list[dict | Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    readings += [STATUS, later(refused=2, malformed=1)]
    main.main(["status", "--socket", "/x"])
    assert "2 connections refused, 1 ended by a malformed frame" in capsys.readouterr().out


def test_status_as_json_is_one_object_with_totals_and_rates(
    readings: list[dict | Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    readings += [STATUS, later()]
    assert main.main(["status", "--socket", "/x", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rates = shown.pop("rates")
    assert shown == later()
    assert (rates["disk_read_bytes"], rates["lookups"], rates["saved_blocks"]) == (4 << 20, 50, 0)
    assert "host_used_bytes" not in rates


def test_no_answer_is_exit_code_1(readings: list[dict | Exception], capsys: pytest.CaptureFixture[str]) -> None:
    readings.append(errors.ServerError("no server answers on /x"))
    assert main.main(["status", "--socket", "/x"]) == 1
    assert capsys.readouterr().err == "undercroft: error: no server answers on /x\n"


def test_watching_outlasts_a_restart_and_makes_no_rates_over_it(
    readings: list[dict | Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    restarted = later(-90) | {"pid": 78}
    gone = errors.ServerError("gone")
    readings += [STATUS, later(), gone, gone, gone, restarted, later(-80) | {"pid": 78}, gone]
    assert main.main(["status", "--json", "--watch", "0.5"]) == 130
    printed = capsys.readouterr()
    shown = [json.loads(line) for line in printed.out.splitlines()]
    assert [reading["rates"] and reading["rates"]["lookups"] for reading in shown] == [None, 50, None, 0]
    assert printed.err == "undercroft: gone; waiting for it\n" * 2, "said once each time that it goes"


def test_rates_are_of_one_server_only() -> None:
    assert status.with_rates(STATUS, later() | {"pid": 78})["rates"] is None


STAND_IN = """
import sys, threading
from undercroft import _core
from undercroft.cli import main

class Engine:
    def __init__(self, options): pass
    def info(self): return {"host_memory": 1 << 30}
    def stats(self): return {"host_capacity_bytes": int(sys.argv[1]), "disk_degraded": 0}
    def connection(self): return ("up", "") if len(sys.argv) < 3 else ("down", "the server's thread has ended")
    def close(self): sys.argv[1] != "1" or threading.Event().wait()

_core.Engine = Engine
sys.exit(main.main(["serve", "--host-memory", "64MiB"]))
"""


def test_a_second_signal_ends_a_server_that_cannot_close() -> None:
    with subprocess.Popen([sys.executable, "-c", STAND_IN, "1"], stdout=subprocess.PIPE, text=True) as process:
        try:
            for wanted, number in (("ready", signal.SIGTERM), ("stopping", signal.SIGINT)):
                assert any(wanted in line for line in iter(process.stdout.readline, ""))
                process.send_signal(number)
            assert process.wait(30) == 128 + signal.SIGINT
        finally:
            process.kill()


def test_a_server_whose_engine_has_failed_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN, "0"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "undercroft: error: the engine has failed; its panic is in the log above\n"


def test_a_server_whose_thread_has_ended_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN, "2", "dead"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "NOTIFY_SOCKET": "/nowhere/notify"},
    )
    assert done.returncode == 1
    (warning,) = (line for line in done.stdout.splitlines() if "NOTIFY_SOCKET" in line)
    assert warning.endswith(
        " WARNING undercroft: cannot send READY=1 to NOTIFY_SOCKET /nowhere/notify: No such file or directory"
    )
    assert done.stderr == "undercroft: error: the server's thread has ended\n"


class Served:
    """As much of an engine as is scraped."""

    def __init__(self) -> None:
        self.reading = STATUS

    def status(self) -> dict:
        return self.reading

    def stats(self) -> dict:
        return self.reading["stats"]


def page(engine: Served, socket_path: str = "/nowhere/serve.sock") -> int:
    """The port of an engine's page."""
    opened = exporter.Page("127.0.0.1", 0)
    opened.opened(engine, socket_path)
    return opened.port


def asked(port: int, path: str) -> tuple[int, str]:
    """Code and text of an answer over HTTP."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def tenant(digit: str, share: float, host: int, disk: int) -> dict:
    sizes = {"tenant_share": share, "host_bytes": host, "disk_bytes": disk}
    return {**STATUS["sessions"][0], "namespace": digit * 64, **sizes}


def test_metrics_by_tenant_are_those_of_models_with_a_share() -> None:
    engine = Served()
    # A model with two vLLMs has its figures in both sessions.
    engine.reading = STATUS | {
        "sessions": [tenant("a", 0.3, 7, 50), tenant("b", 0.0, 9, 90), tenant("c", 0.05, 1, 0), tenant("a", 0.3, 7, 50)]
    }
    text = scrape(page(engine))
    assert [line for line in text.splitlines() if line.startswith("vllm:undercroft_tenant_")] == [
        'vllm:undercroft_tenant_share{namespace="aaaaaaaaaaaa"} 0.3',
        'vllm:undercroft_tenant_share{namespace="cccccccccccc"} 0.05',
        'vllm:undercroft_tenant_bytes{namespace="aaaaaaaaaaaa",tier="host"} 7.0',
        'vllm:undercroft_tenant_bytes{namespace="aaaaaaaaaaaa",tier="disk"} 50.0',
        'vllm:undercroft_tenant_bytes{namespace="cccccccccccc",tier="host"} 1.0',
        'vllm:undercroft_tenant_bytes{namespace="cccccccccccc",tier="disk"} 0.0',
    ]


def test_metrics_are_those_of_the_connector_and_the_servers_own() -> None:
    engine = Served()
    port = page(engine)
    text = scrape(port)
    for line in (
        "# TYPE vllm:undercroft_transfer_bytes_total counter",
        'vllm:undercroft_transfer_bytes_total{direction="load",tier="disk"} 1.048576e+07',
        'vllm:undercroft_used_bytes{tier="host"} 1.7179869184e+10',
        "vllm:undercroft_degraded_disks 1.0",
        "vllm:undercroft_saved_blocks_total 40.0",
        'vllm:undercroft_io_engine_info{io_engine="io_uring"} 1.0',
        'vllm:undercroft_io_engine_info{io_engine="thread_pool"} 0.0',
        'vllm:undercroft_build_info{version="1.2.3"} 1.0',
        "# TYPE vllm:undercroft_disk_operation_seconds histogram",
        'vllm:undercroft_disk_operation_seconds_bucket{direction="load",disk="0",le="0.001"} 60.0',
        'vllm:undercroft_disk_operation_seconds_bucket{direction="load",disk="0",le="+Inf"} 100.0',
        'vllm:undercroft_disk_operation_seconds_count{direction="load",disk="0"} 100.0',
        'vllm:undercroft_disk_operation_seconds_sum{direction="load",disk="0"} 0.2',
        'vllm:undercroft_disk_operation_seconds_count{direction="load",disk="1"} 2.0',
        'vllm:undercroft_disk_operation_seconds_count{direction="save",disk="1"} 0.0',
        'vllm:undercroft_disk_info{disk="0",path="/a"} 1.0',
        'vllm:undercroft_disk_info{disk="1",path="/b"} 1.0',
        "vllm:undercroft_active_lookups 3.0",
        "vllm:undercroft_connections 4.0",
        "vllm:undercroft_served_lookups_total 500.0",
        "vllm:undercroft_open_descriptors 21.0",
    ):
        assert line in text, text
    assert "hit_tokens" not in text, "what vLLM's side counts is not the server's to tell"
    assert 'disk="2"' not in text, "there are two directories"
    engine.reading = later()
    assert "vllm:undercroft_served_lookups_total 600.0" in scrape(port)
    engine.reading["info"]["disks"] = []
    assert 'io_engine_info{io_engine="io_uring"} 0.0' in scrape(port), "without a disk tier no IO engine is used"


def test_the_port_has_four_addresses_and_says_so_before_the_engine_is_open() -> None:
    early = exporter.Page("127.0.0.1", 0)
    for path in ("/", "/status", "/health", "/metrics"):
        assert asked(early.port, path) == (503, "the engine is not open yet\n")
    port = page(Served())
    assert asked(port, "/metrics?name=x")[0] == 200
    for path in ("/healthz", "/metrics/", "/statuses"):
        assert asked(port, path) == (404, "this server has /, /status, /health and /metrics\n")


def test_the_health_of_a_server_that_does_not_answer_is_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "HEALTH_TIMEOUT_S", 0.2)
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        code, text = asked(page(Served(), str(path)), "/health")
    assert (code, text) == (503, f'"{path}": the server does not answer\n')
    code, text = asked(page(Served(), str(tmp_path / "none")), "/health")
    assert (code, "is an engine running there" in text) == (503, True), text


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_connections_that_say_nothing_take_few_threads_and_descriptors() -> None:
    port = page(Served())
    threads, before = threading.active_count(), descriptors()
    held = []
    for _ in range(200):
        held.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        held[-1].sendall(b"GET /metrics HTTP/1.1\r\n")
    assert held[0].recv(1) == b"", "the oldest are ended"
    assert "vllm:undercroft_active_lookups 3.0" in scrape(port)
    # The server closes them a moment after the client has seen their end.
    until("few are open", lambda: descriptors() - len(held) - before <= exporter.CONNECTIONS_MAX)
    assert threading.active_count() - threads <= exporter.CONNECTIONS_MAX + 1
    for connection in held:
        connection.close()


def test_a_connection_that_does_not_end_its_request_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "CONNECTION_TIMEOUT_S", 0.2)
    port = page(Served())
    with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert slow.recv(1) == b""
    assert "vllm:undercroft_active_lookups 3.0" in scrape(port)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"^metrics on 127.0.0.1 port {port}: Address already in use$"):
            exporter.Page("127.0.0.1", port)
