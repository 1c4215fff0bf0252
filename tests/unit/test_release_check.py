"""Releases that `make release-check` refuses."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import release_check
from release_check import FILES, Steps, call, metadata_problems, notes, sbom_problems, version_problems, wheel_problems

METADATA = """\
Metadata-Version: 2.4
Name: undercroft
Version: 0.1.0
Summary: A cache
Requires-Python: >=3.11
License-Expression: Apache-2.0

See [there](https://there).
"""
COMPONENTS: list[dict[str, Any]] = [{"name": "libc", "version": "0.2", "licenses": [{"expression": "MIT"}]}]


def wheel(
    place: Path,
    *,
    tag: str = "manylinux_2_28_x86_64",
    without: str = "",
    commit: str = "abc123",
    changed: str = "",
) -> Path:
    path = place / f"undercroft-0.1.0-cp311-abi3-{tag}.whl"
    info = "undercroft-0.1.0.dist-info"
    files = dict.fromkeys(FILES["undercroft"], f"commit {commit}") | {
        f"{info}/METADATA": METADATA,
        f"{info}/sboms/undercroft.cyclonedx.json": json.dumps({"components": COMPONENTS}),
    }
    with zipfile.ZipFile(path, "w") as found:
        kept = {name: text for name, text in files.items() if not without or without not in name}
        for name, text in kept.items():
            found.writestr(name, text if name != changed else f"{text} ")
        found.writestr(f"{info}/RECORD", "".join(f"{one},sha256={digest(text)},1\n" for one, text in kept.items()))
    return path


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def problems(path: Path, version: str = "0.1.0") -> list[str]:
    return wheel_problems(path, version, portable=True, commit="abc123")


def test_a_good_wheel_has_no_problem(tmp_path: Path) -> None:
    assert problems(wheel(tmp_path)) == []


@pytest.mark.parametrize("name", FILES["undercroft"])
def test_a_file_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    assert any(f"it lacks {name}" in one for one in problems(wheel(tmp_path, without=name)))


def test_a_wheel_of_another_version_platform_or_build_is_refused(tmp_path: Path) -> None:
    [found] = problems(wheel(tmp_path), "0.2.0")
    assert "its version is 0.1.0, and that of Cargo.toml is 0.2.0" in found
    [found] = problems(wheel(tmp_path, tag="manylinux_2_36_x86_64"))
    assert found.endswith("it is for manylinux_2_36_x86_64, not for manylinux_2_28")
    [found] = problems(wheel(tmp_path, commit="unknown"))
    assert "does not name the commit abc123" in found
    [found] = problems(wheel(tmp_path, without="sboms"))
    assert found.endswith("it has no list of components")


@pytest.mark.parametrize("name", FILES["undercroft"])
def test_a_file_that_is_not_the_recorded_one_is_named(name: str, tmp_path: Path) -> None:
    [found] = problems(wheel(tmp_path, changed=name))
    assert found.endswith(f"its RECORD has no or another digest of {name}")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Summary: A cache\n", "", "no Summary"),
        ("License-Expression: Apache-2.0\n", "", "no License-Expression"),
        ("(https://there)", "(docs/there.md)", "relative link"),
        ("See [there]", "![there]", "picture"),
    ],
)
def test_metadata_that_the_index_shows_wrongly_are_refused(old: str, new: str, said: str) -> None:
    assert metadata_problems(Parser().parsestr(METADATA)) == []
    [found] = metadata_problems(Parser().parsestr(METADATA.replace(old, new)))
    assert said in found


def test_each_component_has_a_version_and_a_license() -> None:
    assert sbom_problems([{"components": COMPONENTS}]) == []
    assert sbom_problems([{}]) == ["its list of components is empty"]
    bare = [{"name": "b", "version": "1"}, {"name": "a", "licenses": [{}]}]
    assert sbom_problems([{"components": COMPONENTS + bare}]) == [
        "its list of components has no version or license of a, b"
    ]


LOG = "# Changelog\n\nIntroduction.\n\n## {}\n\n- new\n\n## 0.0.9, 2026-01-01\n\n- old\n"


def test_the_change_log_begins_with_the_version_and_a_tagged_one_has_a_date() -> None:
    open_one, done = LOG.format("Unreleased: 0.1.0, the first release"), LOG.format("0.1.0, 2026-12-01")
    assert version_problems("0.1.0", open_one, tagged=False) == version_problems("0.1.0", done, tagged=True) == []
    [found] = version_problems("0.1.0", open_one, tagged=True)
    assert "has no date" in found
    [found] = version_problems("0.2.0", done, tagged=False)
    assert "the version is 0.2.0" in found
    assert version_problems("0.1.0", "# Changelog\n", tagged=False)


def test_the_notes_are_those_of_the_newest_version() -> None:
    assert notes(LOG.format("0.1.0, 2026-12-01")) == "## 0.1.0, 2026-12-01\n\n- new\n"


def test_the_tree_s_own_change_log_and_version_fit() -> None:
    root = Path(__file__).resolve().parents[2]
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert version_problems("0.1.0", changelog, tagged=False) == []
    assert notes(changelog).startswith("## ")


def test_a_step_whose_program_fails_is_a_problem_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps()
    steps.run("first", lambda: [call("false")])
    steps.run("second", lambda: [call("sh", "-c", "echo why; exit 3")])
    steps.run("third", lambda: ["bad"])
    assert steps.problems == [
        "first: false ended with status 1",
        "second: sh -c echo why; exit 3 ended with status 3\nwhy",
        "bad",
    ]
    assert [name for name, _ in steps.took] == ["first", "second", "third"]
    assert capsys.readouterr().out == "== first\n== second\n== third\n"


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
def test_each_processor_runs_its_own_wheel(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = {name: wheel(tmp_path, tag=f"manylinux_2_28_{name}") for name in ("aarch64", "x86_64")}
    installed: list[object] = []
    ran: list[tuple[object, ...]] = []

    def run(*command: object, **_: object) -> str:
        ran.append(command)
        return f"{machine} 3.13.5" if "machine" in str(command[-1]) else f"0.1.0 {tmp_path}"

    monkeypatch.setattr(release_check, "DIST", tmp_path)
    monkeypatch.setattr(release_check, "uv", lambda *command: installed.append(set(command) & set(wheels.values())))
    monkeypatch.setattr(release_check, "call", run)
    monkeypatch.setattr(release_check.platform, "machine", lambda: "x86_64")
    assert release_check.install(tmp_path, "vllm") == []
    assert installed.pop() == {wheels["x86_64"]}
    installed.clear()
    found = release_check.try_emulated(tmp_path / "aarch64", "0.1.0")
    if machine == "x86_64":
        assert found == ["the emulated Python runs on x86_64"]
    else:
        assert (found, installed) == ([], [{wheels["aarch64"]}])
        assert [command[2] for command in ran[1:]] == ["python-aarch64"] * 4, "the probe, version, benchmark, engine"
