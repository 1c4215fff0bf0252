"""Writes the text that a package index shows, python/README.md, from README.md: `python tools/package_readme.py`.

An index resolves no relative link and shows no picture of the tree. So pictures are left out, and links lead to the
address `Source` of `[project.urls]`; while it is not set, their text stays without a link.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "python/README.md"
GENERATED = "<!-- Written by `python tools/package_readme.py`. Change README.md, then run it again. -->\n\n"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def page() -> str:
    """The text, as README.md and pyproject.toml are now."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return GENERATED + written((ROOT / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Source"))


def written(readme: str, source: str | None) -> str:
    """A README for readers who do not have the tree."""

    def linked(found: re.Match[str]) -> str:
        text, target = found.groups()
        if re.match(r"[a-z]+:", target):
            return found[0]
        if source is None or target.startswith("#"):
            return text
        return f"[{text}]({source.rstrip('/')}/blob/main/{target})"

    without_pictures = re.sub(r"(?m)^!\[[^\]]*\]\([^)]*\)\n+", "", readme)
    return LINK.sub(linked, without_pictures)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
