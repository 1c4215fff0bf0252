"""Reference pages are those of the code, the JSON page names fields that exist, the chart is that of the results."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from undercroft import _core
from undercroft.cli import main

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
TRACE = {"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2]}


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


PAGES = ["reference/options.md", "reference/metrics.md", "reference/cli.md", "internals/vllm-changes.md"]


@pytest.mark.parametrize("page", PAGES)
def test_a_reference_page_is_that_of_the_code(page: str) -> None:
    pages = tool("reference").pages()
    assert set(PAGES) == set(pages)
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == pages[page], "run: python tools/reference.py"


def test_the_readme_of_the_package_is_that_of_the_repository_without_relative_links() -> None:
    readme = tool("package_readme")
    text = readme.PAGE.read_text(encoding="utf-8")
    assert text == readme.page(), "run: python tools/package_readme.py"
    assert re.findall(r"\]\((?!https?:)", text) == []
    assert "![" not in text


def test_links_of_the_package_s_readme_lead_to_the_source_once_it_has_an_address() -> None:
    text = "![A picture](docs/a.svg)\n\nSee [one](docs/one.md#top), [there](https://there) and [here](#here).\n"
    written = tool("package_readme").written
    assert written(text, None) == "See one, [there](https://there) and here.\n"
    assert written(text, "https://host/a/b/") == (
        "See [one](https://host/a/b/blob/main/docs/one.md#top), [there](https://there) and here.\n"
    )


def test_the_chart_is_that_of_the_results() -> None:
    chart = tool("chart")
    drawn = chart.draw((ROOT / "benches/RESULTS.md").read_text(encoding="utf-8"))
    assert chart.CHART.read_text(encoding="utf-8") == drawn, "run: python tools/chart.py"


def test_all_labels_of_the_chart_are_equally_exact() -> None:
    assert [tool("chart").shown(value) for value in (25.56, 7.09, 13.0, 279.7)] == ["25.6", "7.09", "13.0", "280"]


def test_a_chart_without_its_table_says_so() -> None:
    with pytest.raises(ValueError, match="no table of milliseconds"):
        tool("chart").draw("# Results\n")


def documented(command: str) -> set[str]:
    """The fields of a command's section, with the paths to those within."""
    text = (REFERENCE / "json.md").read_text(encoding="utf-8")
    section = re.search(rf"^## undercroft {command}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"json.md has no section for undercroft {command}"
    cells = re.findall(r"^\| (`[^|]+) \|", section[1], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def missing(value: dict[str, Any], names: set[str]) -> set[str]:
    """Names of fields that an output does not have. Those of an empty list cannot be missed."""
    absent = set()
    for name in names:
        key, _, inner = name.partition("[].")
        key = key.removesuffix("[]")
        if key not in value or (inner and value[key] and inner not in value[key][0]):
            absent.add(name)
    return absent


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    main.main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)


def outputs(capsys: pytest.CaptureFixture[str], command: str, place: Path) -> dict[str, Any]:
    model, trace, store = place / "config.json", place / "trace.jsonl", place / "store"
    model.write_text(json.dumps(LLAMA))
    trace.write_text("".join(json.dumps(TRACE | {"timestamp": time}) + "\n" for time in (0, 1000)))
    if command == "inspect":
        _core.Engine({"host_memory": 32 << 20, "disks": [{"path": str(store), "capacity": 64 << 20}]}).close()
        return printed(capsys, "inspect", str(store), "--verify") | {"dropped_namespaces": 0, "differences": []}
    arguments = {
        "doctor": ["doctor", "--role", "serve"],
        "check-config": ["check-config", json.dumps({"host_memory": "64MiB", "disk_path": str(store)})],
        "size": ["size", str(model)],
        "estimate": ["estimate", "--trace", str(trace), "--model", str(model), "--host-memory", "1GiB"],
    }
    arguments["estimate --hosts"] = [*arguments["estimate"], "--hosts", "2", "--remote", "1GiB"]
    found = printed(capsys, *arguments[command])
    return found | ({"server": ""} if command == "check-config" else {})


@pytest.mark.parametrize("command", ["doctor", "check-config", "size", "estimate", "estimate --hosts", "inspect"])
def test_documented_json_fields_exist(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = documented(command)
    assert len(names) > 3
    assert not missing(outputs(capsys, command, tmp_path), names), f"docs/reference/json.md, undercroft {command}"


def test_a_documented_field_that_is_not_there_would_be_seen() -> None:
    assert missing({"checks": [{"name": "memlock"}]}, {"checks[].name", "checks[].colour", "okay"}) == {
        "checks[].colour",
        "okay",
    }


def test_every_command_that_prints_json_has_its_section() -> None:
    text = (REFERENCE / "json.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"^## undercroft ([a-z-]+)$", (REFERENCE / "cli.md").read_text(encoding="utf-8"), re.M))
    sections = set(re.findall(r"^## undercroft ([a-z-]+)$", text, re.MULTILINE))
    assert commands - sections == {"serve"}
