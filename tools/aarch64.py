"""Runs a command with all that builds and runs programs for aarch64: `python tools/aarch64.py cargo test --target ...`.

The compiler is the installed one if it has Rust's standard library for aarch64 (`rustup target add` brings it). Else,
and for the emulator, libc and Python, Debian's packages are unpacked below .venv-aarch64; nothing is installed. Zig,
from PyPI, links against the glibc of manylinux_2_28. `python-aarch64` is the emulated Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PLACE = Path(__file__).resolve().parent.parent / ".venv-aarch64"
TARGET = "aarch64-unknown-linux-gnu"
MIRROR = "http://deb.debian.org"
SUITES = (("debian", "trixie"), ("debian-security", "bookworm-security"))
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PYTHON_PACKAGES = ("maturin>=1.9.4,<2", "ziglang>=0.13")
RUNTIME = ("qemu-user", "libc6:arm64", "libgcc-s1:arm64", "python3:arm64")
COMPILER = ("rustc-web", "libstd-rust-web-dev", "libstd-rust-web-dev:arm64")
"""Those with which Debian builds browsers: the release's own compiler is older than the one that undercroft needs. In
backports the versions for two processors differ at times, while a security suite has all of them or none."""


def main(command: list[str]) -> int:
    """Prepare what is missing, then run the command; its exit status."""
    if not command:
        sys.exit("usage: python tools/aarch64.py COMMAND ...")
    installed = _has_target()
    tools, tree = PLACE / "bin", PLACE / "debian"
    if not (tools / "maturin").exists():
        subprocess.run([sys.executable, "-m", "venv", str(PLACE)], check=True)
        subprocess.run([str(tools / "python"), "-m", "pip", "install", "--quiet", *PYTHON_PACKAGES], check=True)
    # The crate cc names the target in its own way, which Zig does not know.
    drop = 'for given; do shift; case "$given" in --target=*) ;; *) set -- "$@" "$given" ;; esac; done\n'
    _script(tools / "zigcc", f'{drop}exec {tools}/python -m ziglang cc -target aarch64-linux-gnu.2.28 "$@"')
    _script(tools / "zigar", f'exec {tools}/python -m ziglang ar "$@"')
    if not tree.exists():
        _unpack(RUNTIME if installed else RUNTIME + COMPILER, tree)
    (tools / "rustc").unlink(missing_ok=True)
    if not installed:
        loader = f"{tree}/lib64/ld-linux-x86-64.so.2 --library-path {tree}/usr/lib/x86_64-linux-gnu"
        _script(tools / "rustc", f'exec {loader} {tree}/usr/bin/rustc --sysroot {tree}/usr "$@"')
    runner = f"{tree}/usr/bin/qemu-aarch64 -L {tree}"
    _script(tools / "python-aarch64", f'exec {runner} {tree}/usr/bin/python3 "$@"')
    variables = f"CARGO_TARGET_{TARGET.upper().replace('-', '_')}"
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        f"{variables}_LINKER": str(tools / "zigcc"),
        f"{variables}_RUNNER": runner,
        # For crates with C sources, such as that of the ciphers.
        f"CC_{TARGET.replace('-', '_')}": str(tools / "zigcc"),
        f"AR_{TARGET.replace('-', '_')}": str(tools / "zigar"),
        # For tests that start processes of their own.
        "UNDERCROFT_TEST_RUNNER": runner,
        # Two compilers do not share what they built.
        "CARGO_TARGET_DIR": str(PLACE / "target"),
    }
    return subprocess.run(command, env=os.environ | environment).returncode


def _has_target() -> bool:
    """Whether the installed compiler has the standard library for aarch64."""
    if shutil.which("rustc") is None:
        return False
    asked = ["rustc", "--print", "target-libdir", "--target", TARGET]
    found = subprocess.run(asked, capture_output=True, text=True)
    return found.returncode == 0 and Path(found.stdout.strip()).is_dir()


def _unpack(packages: tuple[str, ...], tree: Path) -> None:
    """Unpack packages of Debian, and those that they depend on, below a directory."""
    if shutil.which("apt-get") is None or not KEYS.exists():
        sys.exit(
            f"error: this needs apt-get and {KEYS} (Debian, or Ubuntu with debian-archive-keyring), "
            f"to unpack {' '.join(packages)} below {tree}"
        )
    apt, new = PLACE / "apt", tree.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    for directory in ("etc/apt.conf.d", "etc/preferences.d", "state/lists/partial", "cache/archives/partial"):
        (apt / directory).mkdir(parents=True, exist_ok=True)
    origin = f"deb [arch=amd64,arm64 signed-by={KEYS}] {MIRROR}"
    sources = [f"{origin}/{archive} {suite} main" for archive, suite in SUITES]
    (apt / "etc/sources.list").write_text("\n".join(sources) + "\n")
    (apt / "state/status").touch()
    (apt / "apt.conf").write_text(
        f'Dir "{apt}/"; Dir::Etc "{apt}/etc"; Dir::State "{apt}/state"; Dir::State::status "{apt}/state/status";\n'
        f'Dir::Cache "{apt}/cache"; APT::Architecture "amd64"; APT::Architectures {{"amd64"; "arm64";}};\n'
        'APT::Sandbox::User "root"; APT::Install-Recommends "false"; Acquire::Languages "none";\n'
    )
    environment = os.environ | {"APT_CONFIG": str(apt / "apt.conf")}
    print(f"Unpacking {' '.join(packages)} of Debian below {tree} (1.5 GB the first time)", flush=True)
    subprocess.run(["apt-get", "-qq", "update"], env=environment, check=True)
    fetch = ["apt-get", "-qq", "--yes", "--download-only", "install"]
    if subprocess.run([*fetch, *packages], env=environment).returncode != 0:
        sys.exit(f"error: apt cannot fetch these packages. Without Debian's compiler: rustup target add {TARGET}")
    # As Debian's base-files has them: packages bring files below /usr only.
    for name in ("bin", "lib", "lib64", "sbin"):
        (new / "usr" / name).mkdir(parents=True)
        (new / name).symlink_to(f"usr/{name}")
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(new)], check=True)
    shutil.rmtree(apt)
    new.rename(tree)


def _script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
