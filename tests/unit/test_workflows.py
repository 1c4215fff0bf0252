"""The workflows of the public repository call targets of the Makefile, and name files that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job.get("steps", [])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_and_files_that_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(path):
        called = re.findall(r"^make ([a-z0-9-]+)", step.get("run", ""), re.MULTILINE)
        assert set(called) <= targets
        for manifest in re.findall(r"--manifest-path (\S+)", str(step.get("with", {}).get("args", ""))):
            assert (ROOT / manifest).is_file()
        if step.get("run", "").startswith(".ci/"):
            assert (ROOT / step["run"].split()[0]).is_file()


def test_the_jobs_side_by_side_run_all_that_make_test_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    parts = [shlex.split(part) for part in jobs["test"]["strategy"]["matrix"]["make"]]
    needed = re.search(r"^test: ([a-z -]+?)  ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert needed is not None
    assert {"lint"} | {part[0] for part in parts} == set(needed[1].split())
    named = [path for part in parts for path in part[-1].removeprefix("TESTS=").split() if part[0] == "test-python"]
    tests = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert {path for path in tests if not path.startswith(tuple(named))} == set()
    assert len(named) == len(set(named)) and not list((ROOT / "tests").glob("test_*.py"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_hash_with_their_version(path: Path) -> None:
    """A tag or branch of an action may be moved; a commit may not."""
    used = re.findall(r"uses: (.*)$", path.read_text(), re.MULTILINE)
    assert used
    for one in used:
        assert one.startswith("./") or re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one), one


def test_published_wheels_are_attested_and_their_contents_are_listed() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    actions = [step["uses"].partition("@")[0] for step in publish["steps"]]
    assert actions == [
        "actions/download-artifact", "actions/attest-build-provenance", "pypa/gh-action-pypi-publish",
    ]  # fmt: skip
    download, attest, upload = (step["with"] for step in publish["steps"])
    assert (attest["subject-path"], upload["attestations"]) == (f"{download['path']}/*", True)
    # The index takes wheels and the source alone, so the list of contents is no part of the download.
    keeps = ("actions/upload-artifact@", "anchore/sbom-action@")
    all_steps = steps(ROOT / ".github/workflows/wheels.yml")
    kept = [step["with"] for step in all_steps if step.get("uses", "").startswith(keeps)]
    names = [one.get("name") or one["artifact-name"] for one in kept]
    assert [name for name in names if not name.startswith(download["pattern"].rstrip("*"))] == ["undercroft.spdx.json"]
    assert len(names) == 3


def test_the_release_compares_its_tag_with_the_version_of_the_crates() -> None:
    command = next(step["run"] for step in steps(ROOT / ".github/workflows/release.yml") if "run" in step)
    expression = re.search(r"sed -n 's/(.*?)/\\1/p'", command)
    assert expression is not None
    pattern = expression[1].replace(r"\(", "(").replace(r"\)", ")")
    found = re.findall(pattern, (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert len(found[:1]) == 1 and re.fullmatch(r"\d+\.\d+\.\d+", found[0])


def test_a_report_of_a_bug_asks_for_the_doctors_findings() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    required = {field["id"] for field in form["body"] if field.get("validations", {}).get("required")}
    assert "doctor" in required
    assert "undercroft doctor --json" in str(form)


TOOLS = ("bash", "dirname", "df", "env", "grep", "id", "mktemp", "rm", "tee")
"""Commands that `.ci/run` uses, beside those that the test replaces."""


def test_a_package_that_cannot_be_installed_keeps_no_other_from_being_installed(tmp_path: Path) -> None:
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    scripts = {
        "apt-get": f'echo "$*" >>{tmp_path}/asked; case "$*" in *prometheus*) exit 100; esac',
        "make": "exit 3",
        "sudo": 'shift; "$@"',
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (tmp_path / name).chmod(0o700)
    ran = subprocess.run([ROOT / ".ci/run"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert ran.returncode == 3, "make's exit status"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0].startswith("update")
    assert [line.split()[-1] for line in asked[1:]] == ["redis-server", "chromium", "prometheus", "buildah"]
    assert ran.stderr.splitlines() == ["prometheus cannot be installed: tests of the alerts are skipped"]


@pytest.mark.parametrize("target", ["wheel", "wheel-aarch64"])
def test_every_wheel_of_undercroft_knows_its_commit(target: str) -> None:
    commands = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert commands is not None
    first = commands[1].splitlines()[0]
    assert "maturin build" in first
    assert first.index("$(COMMIT); ") < first.index("maturin build")
