"""Images that `make release-check` refuses."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import images
import pytest
from images import DEPLOY, Images, problems, serve_problems, vllm_problems, wheel_context

DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
WHEEL = "undercroft-0.1.0-cp311-abi3-manylinux_2_28_{}.whl"


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    dist = tmp_path / "dist"
    dist.mkdir()
    for machine in ("x86_64", "aarch64"):
        for name in (WHEEL, WHEEL.replace("undercroft", "undercroft_bench")):
            (dist / name.format(machine)).write_text("")
    return wheel_context(dist, tmp_path / "context")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_each_image_copies_files_that_its_context_has_and_one_wheel(file: Path, context: Path) -> None:
    names = [path.name for path in context.iterdir()]
    copied = re.findall(r"^COPY (.*) \S+$", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert copied
    found = {source: fnmatch.filter(names, source) for line in copied for source in line.split()}
    assert [len(matches) for matches in found.values()] == [1] * len(found), found


@pytest.fixture
def made(tmp_path: Path) -> Images:
    """Images whose base is empty: nothing can run in them."""
    if lacks := [one for one in images.missing() if one != "debootstrap"]:
        pytest.skip(f"no {lacks}")
    found = Images(tmp_path / "images")
    base = tmp_path / "base"
    base.mkdir()
    (base / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    found.buildah("bud", "--tag", images.BASE, base)
    return found


def without_runs(file: Path, place: Path, old: str = "", new: str = "") -> Path:
    text = re.sub(r"^RUN .*?[^\\]\n", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert old in text
    changed = place / file.name
    changed.write_text(text.replace(old, new))
    return changed


def test_an_image_is_configured_as_its_file_says(made: Images, context: Path, tmp_path: Path) -> None:
    config = made.build(without_runs(DEPLOY / "Dockerfile.serve", tmp_path), context)
    assert config["User"] == "undercroft"
    assert config["Volumes"].keys() == {"/run/undercroft", "/var/cache/undercroft"}
    assert config["ExposedPorts"].keys() == {"9400/tcp"}
    assert config["Entrypoint"][:2] == ["undercroft", "serve"]
    assert config["Healthcheck"]["Test"][:3] == ["CMD", "undercroft", "status"]
    config = made.build(without_runs(DEPLOY / "Dockerfile.vllm", tmp_path), context)
    assert (config["User"], "HOME=/tmp" in config["Env"]) == ("1000:1000", True)


def test_a_file_that_cannot_be_built_says_why(made: Images, context: Path, tmp_path: Path) -> None:
    for old, new, why in (
        ("COPY serve-requirements.txt", "COPY missing.txt", 'missing.txt": no such file'),
        ("VOLUME", "VOLUMES", "VOLUMES"),
        ("FROM ${BASE_IMAGE}", "FROM localhost/other", "localhost/other"),
    ):
        with pytest.raises(subprocess.CalledProcessError) as error:
            made.build(without_runs(DEPLOY / "Dockerfile.serve", tmp_path, old, new), context)
        assert why in error.value.output


SERVER = """
import http.server, json, os, signal, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"pid": os.getpid()}).encode()
        self.send_response(503 if "sick" in sys.argv else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
host, port = sys.argv[sys.argv.index("--metrics") + 1].split(":")
signal.signal(signal.SIGTERM, lambda *_: os._exit(3 if "dirty" in sys.argv else 0))
if "dead" in sys.argv:
    sys.exit("cannot start")
http.server.HTTPServer((host, int(port)), Page).serve_forever()
"""
CONFIG = {
    "User": "undercroft",
    "Volumes": {"/run/undercroft": {}},
    "Entrypoint": ["serve"],
    "Healthcheck": {"Test": ["CMD", "probe"]},
}


class FakeImages:
    """Containers whose commands print what a test says, and whose server has a fault."""

    def __init__(self, fault: str = "", **printed: str) -> None:
        self._fault = fault
        self._printed = {"id": "1000\n", "stat": "1000 700\n", "undercroft": "undercroft 0.1.0 (commit a)\n"} | printed
        self._server: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def container(self, _: str) -> Iterator[str]:
        yield "one"

    def run(self, _: str, command: str, *arguments: object) -> str:
        if command == "probe" and (self._server is None or self._server.poll() is not None) and self._fault != "blind":
            raise subprocess.CalledProcessError(1, [command])
        return self._printed.get(command, "")

    def start(self, _: str, *command: object, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            arguments = [sys.executable, "-c", SERVER, *map(str, command), self._fault]
            self._server = subprocess.Popen(arguments, stdout=out, stderr=out, start_new_session=True)
        return self._server


@pytest.mark.parametrize(
    ("fault", "printed", "said"),
    [
        ("", {}, ""),
        ("", {"id": "0\n", "stat": "0 700\n"}, "its user is root"),
        ("", {"stat": "0 755\n"}, "/run/undercroft has owner and mode 0 755, not 1000 700"),
        ("", {"find": "/tmp/a.whl\n"}, "files are left in /tmp: /tmp/a.whl"),
        ("", {"undercroft": "undercroft 0.0.9\n"}, "undercroft --version prints undercroft 0.0.9"),
        ("dead", {}, "the server does not answer at /health:\ncannot start\n"),
        ("sick", {}, "the server does not answer at /health:\n"),
        ("dirty", {}, "the server ended with 3:\n"),
        ("blind", {}, "the health check succeeds without a server"),
    ],
)
def test_the_image_of_the_server_is_tried(
    fault: str, printed: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "SERVE_S", 2.0 if fault == "sick" else 30.0)
    found: Any = FakeImages(fault, **printed)
    assert "\n".join(serve_problems(found, CONFIG, tmp_path / "log", "0.1.0")).startswith(said)
    assert bool(said) == bool(serve_problems(found, CONFIG, tmp_path / "log", "0.1.0"))


@pytest.mark.parametrize("key", CONFIG)
def test_an_image_without_a_part_of_its_configuration_is_not_run(key: str, tmp_path: Path) -> None:
    found: Any = FakeImages()
    bare = {name: value for name, value in CONFIG.items() if name != key}
    assert serve_problems(found, bare, tmp_path / "log", "0.1.0") == [f"it has no {key}"]


def test_the_image_of_vllm_is_no_root_s_and_keeps_no_wheel() -> None:
    found: Any = FakeImages()
    assert vllm_problems(found, {"User": "1000:1000"}) == []
    found = FakeImages(find="/tmp/a.whl\n")
    assert vllm_problems(found, {"User": ""}) == ["its user is root", "files are left in /tmp: /tmp/a.whl"]


def test_images_need_exactly_one_wheel(context: Path) -> None:
    [said] = problems(context.parent / "other")
    assert "has 0 wheels" in said
    (wheel,) = context.glob("undercroft-*.whl")
    shutil.copy(wheel, context / wheel.name.replace("0.1.0", "0.2.0"))
    [said] = problems(context)
    assert "has 2 wheels" in said
