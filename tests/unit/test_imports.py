"""No modules of the package import each other in a circle, inside functions included; TYPE_CHECKING does not count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import undercroft

PACKAGE = Path(undercroft.__file__).parent


def modules(package: Path) -> dict[str, Path]:
    """Files of a package by the names of their modules."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below ``node`` but those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from (other, *run_time_nodes(other))
            continue
        yield child
        yield from run_time_nodes(child)


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of ``known`` that a module imports by name: ``from package import module`` counts as the module."""
    found: set[str] = set()
    for node in run_time_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively: use the full name"
            base = node.module or ""
            found |= {full if (full := f"{base}.{alias.name}") in known else base for alias in node.names}
    return found & known.keys()


def circles(package: Path) -> list[list[str]]:
    """Circles of imports: for each module that reaches itself, the shortest way, each circle once."""
    known = modules(package)
    edges = {name: imported(name, path, known) for name, path in known.items()}
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(edges):
        ways = [[start]]
        seen: set[str] = set()
        while ways:
            way = ways.pop(0)
            for following in sorted(edges[way[-1]]):
                if following == start:
                    found.setdefault(frozenset(way), [*way, start])
                elif following not in seen:
                    seen.add(following)
                    ways.append([*way, following])
    return list(found.values())


def test_no_circles() -> None:
    assert len(modules(PACKAGE)) > 40, "the package was not found"
    assert circles(PACKAGE) == []


def test_the_check_sees_circles(tmp_path: Path) -> None:
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("def f():\n    from sample import b\n")
    (package / "b.py").write_text("from sample.c import C\n")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample import a\n")
    assert circles(package) == []
    (package / "c.py").write_text("import sample.a\n")
    assert circles(package) == [["sample.a", "sample.b", "sample.c", "sample.a"]]
