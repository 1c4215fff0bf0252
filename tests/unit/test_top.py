"""`undercroft top`: several addresses, some of which do not answer."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve_process import COMMAND, run
from test_serve_cli import STATUS
from test_view import metrics
from undercroft.cli import main, top
from undercroft.view import hosts

PLAIN = {"NO_COLOR": "1", "COLUMNS": "160"}


class Node:
    """A host whose addresses answer with these texts; others answer 404."""

    def __init__(self, **texts: str) -> None:
        self.texts = texts
        self.asked: list[str] = []
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/")
                node.asked.append(name)
                body = node.texts.get(name, "no such page").encode()
                self.send_response(200 if name in node.texts else 503 if name == "health" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def vllm() -> Iterator[Node]:
    with closing(Node(metrics=metrics("0") + metrics("1"))) as node:
        yield node


@pytest.fixture
def server() -> Iterator[Node]:
    with closing(Node(status=json.dumps(STATUS), metrics="never asked")) as node:
        yield node


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_one_picture_has_all_engines_and_names_those_that_do_not_answer(vllm: Node, server: Node, silent: str) -> None:
    with closing(Node(metrics="<html>")) as other, closing(Node(metrics="up 1\n")) as plain:
        began = time.monotonic()
        places = [vllm.address, server.address, silent, other.address, plain.address, "127.0.0.1:1"]
        done = run("top", "--once", *places, **PLAIN)
        took = time.monotonic() - began
    lines = done.stdout.splitlines()

    def line(start: str) -> str:
        return next(one for one in lines if one.startswith(start))

    assert done.returncode == 1
    assert "4 of 7 do not answer" in done.stderr
    assert took < 3 * hosts.TIMEOUT_S + 10, "nobody waits for the silent one"
    for place in (f"{vllm.address} m 0", f"{vllm.address} m 1", server.address):
        assert " answers " in line(place), done.stdout
    assert "no answer within 2 s" in line(silent)
    assert "not a page of an engine" in line(other.address)
    assert "undercroft is not on its page of metrics" in line(plain.address)
    assert "Connection refused" in line("127.0.0.1:1")
    assert any("No space left on device" in one for one in lines)
    assert any(one.startswith(f"{vllm.address} m 0") and "50 %" in one for one in lines)
    assert "metrics" not in server.asked
    assert vllm.asked.count("status") == 1, "a vLLM has no status, and is not asked again"


def test_a_host_that_fails_is_reported_at_once_and_without_its_old_figures(server: Node) -> None:
    host = hosts.Host(f"http://{server.address}")
    host.read()
    assert [one.trouble for one in host.engines(patience_s=1000)] == [""]
    server.texts.clear()
    host.read()
    (one,) = host.engines(patience_s=1000)
    assert (one.now, one.trouble) == (None, "HTTP 404")


def test_json_is_one_object_with_the_readings(vllm: Node, server: Node) -> None:
    done = run("top", "--once", "--json", f"http://{server.address}/metrics", vllm.address)
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout)["engines"]
    assert (first["engine"], first["trouble"]) == (server.address, None)
    assert first["stats"]["host_used_bytes"] == STATUS["stats"]["host_used_bytes"]
    assert first["disks"][1]["fault"] == "No space left on device"
    assert second["tokens"]["device"] == 500
    assert third["engine"] == f"{vllm.address} m 1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node1", "node1 names no port"),
        ("ftp://node1:1", "is no address"),
        ("node1:99999", "the port is no number up to 65535"),
        ("http://me:secret@node1:1", "has credentials"),
    ],
)
def test_a_wrong_address_is_refused_with_the_allowed_forms(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["top", text])
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error


def test_without_addresses_the_engines_of_the_user_are_shown_or_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main.main(["top", "--once"]) == 1
    assert "no engine of this user answers here; give addresses" in capsys.readouterr().err


def test_without_the_library_that_draws_its_package_is_named(
    vllm: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main.main(["top", "--once", vllm.address]) == 2
    assert "pip install 'undercroft[top]'" in capsys.readouterr().err
    monkeypatch.setattr(top, "ONCE_S", 0.05)
    assert main.main(["top", "--once", "--json", vllm.address]) == 0


def test_escape_sequences_of_a_host_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "ONCE_S", 0.05)
    status = STATUS | {"info": {"disks": [STATUS["info"]["disks"][0] | {"path": "/a\x1b[2J[bold]b"}]}}
    with closing(Node(status=json.dumps(status))) as node:
        assert main.main(["top", "--once", node.address]) == 0
    shown = capsys.readouterr().out
    assert "/a\\x1b[2J[bold]b" in shown, "neither the terminal nor the library obeys a name"


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 110, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)

    def until(self, text: str, timeout_s: float = 30) -> str:
        """What is shown until ``text`` is."""
        shown = ""
        deadline = time.monotonic() + timeout_s
        while text not in shown:
            assert time.monotonic() < deadline, f"no {text!r} in {shown[-3000:]}"
            if select.select([self._ours], [], [], 0.1)[0]:
                shown += os.read(self._ours, 65536).decode(errors="replace")
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_the_live_view_follows_a_host_that_falls_silent_and_comes_back(vllm: Node, server: Node) -> None:
    with closing(Terminal("top", "--interval", "0.2", server.address, vllm.address)) as terminal:
        assert "\x1b[?1049h" in terminal.until("Prompt tokens by source"), "the terminal's other screen"
        status, server.texts["status"] = server.texts.pop("status"), ""
        terminal.until("not a page of an engine")
        assert "50 %" in terminal.until("Waits"), "the other is still shown"
        server.texts["status"] = status
        terminal.until("No space left on device")
        terminal.process.send_signal(2)
        terminal.until("\x1b[?1049l")
        assert terminal.process.wait(10) == 130
