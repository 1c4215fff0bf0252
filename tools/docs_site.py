"""Hooks of mkdocs: documents from outside docs/ become pages, and their links lead to pages."""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "benches/RESULTS.md": "lab-records.md",
    "deploy/README.md": "deployment.md",
    "README.md": "index.md",
}
"""Document -> its page; the overview stands for the README."""
SOURCES = {page: document for document, page in PAGES.items() if page != "index.md"}


def on_config(config: Any) -> Any:
    """Name the version at the foot of each page."""
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]
    config.copyright = f"undercroft {workspace['package']['version']} · Apache-2.0"
    return config


def on_post_build(config: Any) -> None:
    """Write llms.txt, the list of pages for programs that read the site."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in config.nav:
        for title, pages in section.items():
            lines += ["", f"## {title}", ""]
            lines += [f"- [{name}]({page.removesuffix('.md')}.html)" for one in pages for name, page in one.items()]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents that lie outside docs/."""
    for page, document in SOURCES.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, **_: Any) -> str:
    """Make links lead to pages, and lists start where GitHub starts them."""
    name = page.file.src_uri
    source = SOURCES.get(name, f"docs/{name}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):
        linked = re.sub(
            r"\[([^\]]*)\]\(([^)\s]+)\)", lambda found: _link(found, source, name, config.repo_url), parts[index]
        )
        # Python-Markdown wants an empty line before a list; CommonMark does not.
        parts[index] = re.sub(r"(?m)^(?!\s|[-*] |\d+\. |$|\||>)(.+)\n(?=(?:[-*]|1\.) )", r"\1\n\n", linked)
    return "".join(parts)


def _link(found: re.Match[str], source: str, page: str, repository: str | None) -> str:
    """The link as it is on the page. A file that is no page links to the repository, or is named without a link."""
    text, target = found[1], found[2]
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return found[0]
    document = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if document in PAGES or document.startswith("docs/"):
        there = PAGES.get(document, document.removeprefix("docs/"))
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{mark}{anchor})"
    if not (ROOT / document).exists():
        # mkdocs warns of it, which ends the build.
        return found[0]
    return f"[{text}]({repository.rstrip('/')}/blob/main/{document})" if repository else text
