"""Code of the site, without mkdocs: the list of pages for programs, and links to documents from outside docs/."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, classes in {"mkdocs": "", "mkdocs.structure": "", "files": "File Files", "pages": "Page"}.items():
        module = ModuleType(name if name.startswith("mkdocs") else f"mkdocs.structure.{name}")
        for one in classes.split():
            setattr(module, one, object)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools/docs_site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tmp_path: Path) -> Any:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return SimpleNamespace(**settings | {"site_dir": str(tmp_path), "repo_url": None})


def test_the_list_for_programs_has_each_page_once(site: ModuleType, config: Any, tmp_path: Path) -> None:
    site.on_post_build(config)
    text = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith(f"# {config.site_name}\n\n> {config.site_description}\n")
    assert re.findall("(?m)^## (.+)$", text) == [title for section in config.nav for title in section]
    listed = re.findall(r"(?m)^- \[[^\]]+\]\((\S+)\.html\)$", text)
    own = [path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    others = [page.removesuffix(".md") for page in site.SOURCES]
    assert sorted(listed) == sorted(own + others)
    lines = [line for line in text.splitlines()[4:] if line]
    assert all(line.startswith(("## ", "- [")) for line in lines)


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[results](results.md)", "[results](results.md)"),
        ("index.md", "[record](../benches/RESULTS.md#the-gate)", "[record](lab-records.md#the-gate)"),
        ("internals/words.md", "[home](../../README.md)", "[home](../index.md)"),
        ("lab-records.md", "[results](../docs/results.md)", "[results](results.md)"),
        ("lab-records.md", "[DIARY.md](DIARY.md)", "DIARY.md"),
        ("index.md", "[other](https://host/x.md)", "[other](https://host/x.md)"),
        ("index.md", "[here](#status)", "[here](#status)"),
    ],
)
def test_links_lead_to_pages(site: ModuleType, config: Any, page: str, link: str, expected: str) -> None:
    of = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert site.on_page_markdown(link, of, config) == expected


def test_files_that_are_no_pages_are_links_once_the_repository_is_named(site: ModuleType, config: Any) -> None:
    config.repo_url = "https://host/undercroft/"
    of = SimpleNamespace(file=SimpleNamespace(src_uri="operate.md"))
    found = site.on_page_markdown("[a dashboard](../deploy/grafana.json)", of, config)
    assert found == "[a dashboard](https://host/undercroft/blob/main/deploy/grafana.json)"
