"""The page of `undercroft serve`, its status and its health, from a real server and in a real browser."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_process import ServeProcess, run
from served_client import Peer, prompt, until
from test_serve_cli import STATUS, Served, asked, page
from undercroft import _core, exporter

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = {"desktop": 1280, "phone": 360}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServeProcess, int]]:
    """A server that has saved blocks, and its port."""
    place = tmp_path_factory.mktemp("a-directory-with-a-long-name-" + "x" * 40)
    disk = ["--disk-path", str(place / "disk"), "--disk-capacity", "64MiB"]
    socket = tmp_path_factory.mktemp("s") / "run" / "serve.sock"
    with ServeProcess(socket, *disk, "--metrics", "0") as found:
        client = Peer(_core.Engine({"server": f"unix://{found.socket}", "server_timeout_ms": 30_000}))
        until("the server", client.is_up)
        client.save(prompt("a"))
        yield found, int(found.printed[1].split()[-1].rpartition(":")[2].partition("/")[0])
        client.close()


def test_the_status_is_that_of_the_command_without_the_options(server: tuple[ServeProcess, int]) -> None:
    process, port = server
    code, text = asked(port, "/status")
    found, direct = json.loads(text), process.status()
    assert code == 200
    # A key file, and parts of a URL, are not for everybody who reaches the port.
    assert direct["info"].pop("options")
    assert found.keys() == direct.keys()
    assert found["info"] == direct["info"]
    assert found["stats"]["host_blocks"] == direct["stats"]["host_blocks"] > 0


def test_without_an_answer_of_the_server_all_but_the_metrics_are_503_with_the_reason(tmp_path: Path) -> None:
    port = page(Served(), str(tmp_path / "none"))
    for path in ("/health", "/status", "/"):
        code, text = asked(port, path)
        assert (code, "is an engine running there" in text) == (503, True), text
    assert asked(port, "/metrics")[0] == 200


def test_the_page_reports_a_failed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = STATUS | {"stats": STATUS["stats"] | {"host_capacity_bytes": 0}}
    monkeypatch.setattr(exporter, "server_status", lambda *_: failed)
    assert asked(page(Served()), "/health") == (503, "the engine has failed\n")


def test_answers_are_neither_kept_nor_taken_for_something_else(server: tuple[ServeProcess, int]) -> None:
    for path, kind in (("/", "text/html; charset=utf-8"), ("/status", "application/json")):
        with urllib.request.urlopen(f"http://127.0.0.1:{server[1]}{path}", timeout=30) as answer:
            assert answer.headers["Content-Type"] == kind
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_only_reading_is_possible(server: tuple[ServeProcess, int]) -> None:
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(f"http://127.0.0.1:{server[1]}/status", b"", method=method)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=30)
        assert error.value.code == 501


def test_rates_come_with_the_second_reading_and_are_those_of_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    status = {"now": STATUS}
    monkeypatch.setattr(exporter, "server_status", lambda *_: status["now"])
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    shown = exporter.Page("127.0.0.1", 0)
    shown.opened(Served(), "/nowhere")

    def lookups(at: float, count: int) -> str:
        clock[0] = at
        status["now"] = STATUS | {"server": STATUS["server"] | {"lookups": count}}
        return shown.picture(shown.status()).partition('data-name="lookups/s">')[2].partition("<")[0]

    assert lookups(100, 500) == "-"
    assert lookups(101, 500) == "-", "a second is too short"
    assert lookups(105, 550) == "10.0"
    assert lookups(106, 560) == "10.0", "a second viewer does not shorten the time of the first"
    assert lookups(110, 560) == "2.0"
    assert lookups(300, 900) == "-", "nobody has looked for long"


def test_top_shows_a_server_by_its_port_and_by_its_socket(server: tuple[ServeProcess, int]) -> None:
    process, port = server
    done = run("top", "--once", f"127.0.0.1:{port}", f"unix://{process.socket}", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" answers ") == 2
    assert done.stdout.count(" good ") == 2


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_a_browser_shows_the_page_without_scrolling_sideways(server: tuple[ServeProcess, int], width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    address = f"http://127.0.0.1:{server[1]}/"
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 800})
        said: list[Any] = []
        loaded: list[str] = []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("request", lambda request: loaded.append(request.url))
        tab.goto(address)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        for title in ("Engines", "Waits", "Disks"):
            assert tab.get_by_role("heading", name=title).is_visible()
        # The name of each figure is beside it on a phone, and above its column elsewhere.
        header = tab.get_by_role("columnheader", name="host memory").bounding_box()
        assert (header["x"] > 0) == (width > 768)
        beside = "getComputedStyle(document.querySelector('td[data-name=\"host memory\"]'), '::before').content"
        assert ("host memory" in tab.evaluate(beside)) == (width <= 768)
        assert "of 64 MiB" in tab.inner_text("main")
        # Of a browser's own accord it asks for an icon, which the page's policy may keep from it.
        assert {url.removesuffix("favicon.ico") for url in loaded} == {address}
        assert [text for text in said if "favicon" not in text and "404" not in text] == []
        browser.close()
