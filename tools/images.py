"""Builds the images of deploy/ from the wheel in dist/ and runs `undercroft serve` in its image, without a registry of
images and without a daemon: `python tools/images.py`, a part of `make release-check`. Exit code 1 with the problems.

Base images cannot be fetched everywhere, so a plain Debian with Python takes their place. Their own contents are not
checked: vLLM itself, and how the image of vLLM starts. The images are thrown away afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
PROGRAMS = ("buildah", "debootstrap")
BASE = "localhost/undercroft-base"
SUITE = "trixie"
"""The Debian whose Python is that of the image of the server: serve-requirements.txt has packages for no other."""
SERVE_S = 60.0
"""How long a server may take until it answers, and how long until it has ended."""


def missing() -> list[str]:
    """What this machine lacks for building images."""
    return [name for name in PROGRAMS if shutil.which(name) is None] + ([] if os.geteuid() == 0 else ["root's rights"])


class Images:
    """Images below a directory."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def buildah(self, *arguments: object) -> str:
        """Run buildah, and return what it printed. Raises CalledProcessError, with the end of its messages."""
        ran = subprocess.run(self._command(*arguments), capture_output=True, text=True)
        if ran.returncode != 0:
            said = "\n".join((ran.stdout + ran.stderr).splitlines()[-20:])
            raise subprocess.CalledProcessError(ran.returncode, ["buildah", *map(str, arguments)], said)
        return ran.stdout

    def _command(self, *arguments: object) -> list[str]:
        store = ("--root", self._place / "store", "--runroot", self._place / "run", "--storage-driver", "vfs")
        return [str(one) for one in ("buildah", *store, *arguments)]

    def make_base(self, suite: str = SUITE) -> None:
        """Make the image that takes the place of the base images. Raises CalledProcessError."""
        tree = self._place / "base"
        packages = "python3,python3-pip,ca-certificates"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(tree)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if made.returncode != 0:
            said = "\n".join(made.stdout.splitlines()[-5:])
            raise subprocess.CalledProcessError(made.returncode, ["debootstrap", suite], said)
        # Python's own image lets pip install for the whole machine; Debian's pip asks for a word first.
        file = "FROM scratch\nCOPY base /\nENV PIP_BREAK_SYSTEM_PACKAGES=1\n"
        (self._place / "Dockerfile.base").write_text(file, encoding="utf-8")
        self.buildah("bud", "--tag", BASE, "--file", self._place / "Dockerfile.base", self._place)
        shutil.rmtree(tree)

    def build(self, file: Path, context: Path, base: str = BASE) -> dict[str, Any]:
        """Build the image of a Dockerfile, named after it, and return its configuration.

        Raises CalledProcessError.
        """
        name = file.suffix.removeprefix(".")
        arguments = ("--isolation", "chroot", "--format", "docker", "--pull-never", "--build-arg", f"BASE_IMAGE={base}")
        # pip in the container trusts whom pip trusts here, and asks the same index.
        mounts = [f"--volume={path}:{path}:ro" for path in ("/etc/ssl/certs", "/etc/pip.conf") if Path(path).exists()]
        vllm = ("--build-arg", f"VLLM_IMAGE={base}")
        self.buildah("bud", *arguments, *vllm, *mounts, "--tag", name, "--file", file, context)
        config: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", name))["Docker"]["config"]
        return config

    @contextlib.contextmanager
    def container(self, image: str) -> Iterator[str]:
        """A container of an image; its name."""
        name = self.buildah("from", "--pull-never", image).strip()
        try:
            yield name
        finally:
            self.buildah("rm", name)

    def run(self, container: str, *command: object) -> str:
        """Run a command in a container as the image's user, and return what it printed. Raises CalledProcessError."""
        return self.buildah("run", "--isolation", "chroot", container, "--", *command)

    def start(self, container: str, *command: object, log: Path) -> subprocess.Popen[bytes]:
        """Start a command in a container, in a process group of its own."""
        with log.open("wb") as out:
            started = self._command("run", "--isolation", "chroot", container, "--", *command)
            return subprocess.Popen(started, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def wheel_context(dist: Path, place: Path) -> Path:
    """A directory with what the heads of the Dockerfiles say that docker gets: the wheels of this processor, and the
    list of the server's packages."""
    place.mkdir()
    for file in (*dist.glob(f"*{os.uname().machine}.whl"), DEPLOY / "serve-requirements.txt"):
        shutil.copy(file, place)
    return place


def serve_problems(images: Images, config: dict[str, Any], log: Path, version: str) -> list[str]:
    """Problems of the image of the server: what it contains and says, and its server while it runs and afterwards."""
    found = [f"it has no {key}" for key in ("User", "Volumes", "Entrypoint", "Healthcheck") if not config.get(key)]
    if found:
        return found
    probe = config["Healthcheck"]["Test"][1:]
    with images.container("serve") as container:
        user = images.run(container, "id", "-u").strip()
        if user == "0":
            found.append("its user is root")
        for path in config["Volumes"]:
            owner = images.run(container, "stat", "-c", "%u %a", path).strip()
            if owner != f"{user} 700":
                found.append(f"{path} has owner and mode {owner}, not {user} 700")
        if left := images.run(container, "find", "/tmp", "-type", "f").split():
            found.append(f"files are left in /tmp: {', '.join(left)}")
        images.run(container, "pip", "check")
        if version not in (said := images.run(container, "undercroft", "--version")):
            found.append(f"undercroft --version prints {said.strip()}")
        # The last address counts: this port is free here.
        port = _free_port()
        options = ("--metrics", f"127.0.0.1:{port}", "--host-memory", "64MiB", "--disk-path", "/var/cache/undercroft/a")
        server = images.start(container, *config["Entrypoint"], *options, "--disk-capacity", "256MiB", log=log)
        try:
            if not _answers(port, server):
                return [*found, f"the server does not answer at /health:\n{log.read_text(encoding='utf-8')}"]
            images.run(container, *probe)
            # buildah does not pass a signal on, so the server gets it itself, as from a container engine.
            os.kill(_pid(port), signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(SERVE_S)
        finally:
            _kill(server)
        if server.returncode != 0:
            found.append(f"the server ended with {server.returncode}:\n{log.read_text(encoding='utf-8')}")
        try:
            images.run(container, *probe)
            found.append("the health check succeeds without a server")
        except subprocess.CalledProcessError:
            pass
    return found


def vllm_problems(images: Images, config: dict[str, Any]) -> list[str]:
    """Problems of the image of vLLM, as far as its own base does not matter."""
    found = [] if config.get("User") not in ("", "0", "root", None) else ["its user is root"]
    with images.container("vllm") as container:
        if left := images.run(container, "find", "/tmp", "-name", "*.whl").split():
            found.append(f"files are left in /tmp: {', '.join(left)}")
        images.run(container, "pip", "check")
        images.run(container, "python3", "-c", "import getpass; getpass.getuser(); import undercroft._core")
    return found


def problems(dist: Path) -> list[str]:
    """Build both images from the wheel in ``dist``, and return their problems. Raises CalledProcessError."""
    wheels = sorted(dist.glob(f"undercroft-[0-9]*{os.uname().machine}.whl"))
    if len(wheels) != 1:
        return [
            f"{dist} has {len(wheels)} wheels of undercroft for this processor, and the images need one: make wheel"
        ]
    version = wheels[0].name.split("-")[1]
    with tempfile.TemporaryDirectory(prefix="images-") as directory:
        place = Path(directory)
        images, context = Images(place), wheel_context(dist, place / "context")
        images.make_base()
        serve = images.build(DEPLOY / "Dockerfile.serve", context)
        found = serve_problems(images, serve, place / "log", version)
        print((place / "log").read_text(encoding="utf-8"), end="")
        found = [f"Dockerfile.serve: {one}" for one in found]
        vllm = images.build(DEPLOY / "Dockerfile.vllm", context)
        return found + [f"Dockerfile.vllm: {one}" for one in vllm_problems(images, vllm)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int, server: subprocess.Popen[bytes]) -> bool:
    """Whether /health says in time that the server serves."""
    end = time.monotonic() + SERVE_S
    while time.monotonic() < end and server.poll() is None:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
        ):
            return bool(answer.status == 200)
        time.sleep(0.2)
    return False


def _pid(port: int) -> int:
    """The process id of the server whose page is on this port; a container made by buildah has no ids of its own."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
        return int(json.load(answer)["pid"])


def _kill(server: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a server and of the buildah that runs it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def main() -> int:
    """Command line."""
    if lacks := missing():
        sys.exit(f"error: this machine has no {' and no '.join(lacks)}")
    try:
        found = problems(ROOT / "dist")
    except subprocess.CalledProcessError as error:
        found = [f"{' '.join(error.cmd)} ended with status {error.returncode}\n{error.output}"]
    for problem in found:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
