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


# Each room of the package, and the other rooms that it may import. Modules at the top are of no room: all import them.
ROOMS = {
    "connector": {"device", "identity", "threshold", "vllm_patches"},
    "connector.observe": {"connector", "estimate"},
    "connector.requests": {"connector", "threshold", "vllm_patches"},
    "connector.scheduler": {"connector", "device", "vllm_patches"},
    "connector.worker": {"connector", "device"},
    "device": set(),
    "embed": set(),
    "estimate": set(),
    "identity": {"device"},
    "model": {"identity"},
    "sglang_hicache": {"embed", "identity"},
    "threshold": set(),
    "vllm_patches": {"threshold"},
    "vllm_tier": {
        *("connector", "connector.observe", "connector.scheduler"),
        *("embed", "identity", "vllm_patches"),
    },
}
ENTRANCES = {
    "undercroft.cli",
    "undercroft.connector.connector",
    "undercroft.connector.wiring",
    "undercroft.plugin",
    "undercroft.registration",
}
"""These put the rooms together, and may import each of them."""


def room_of(module: str) -> str | None:
    """The room of a module; None if it is at the top or an entrance."""
    if any(module == entrance or module.startswith(entrance + ".") for entrance in ENTRANCES):
        return None
    name = module.removeprefix("undercroft.")
    inside = [room for room in ROOMS if name == room or name.startswith(room + ".")]
    return max(inside, key=len, default=None)


def test_each_room_imports_only_the_rooms_below_it() -> None:
    known = modules(PACKAGE)
    rooms = {name: room_of(name) for name in known}
    assert set(ROOMS) <= set(rooms.values()), "a room of the table has no modules"
    wrong = [
        (name, other)
        for name, path in known.items()
        for other in imported(name, path, known)
        if (room := rooms[name]) and (of := rooms[other]) and of != room and of not in ROOMS[room]
    ]
    assert wrong == []


def test_rooms_that_run_without_vllm_import_no_vllm() -> None:
    """SGLang and the commands use these rooms where vLLM is not installed."""
    for room in ("identity", "embed", "sglang_hicache", "estimate", "model"):
        for path in (PACKAGE / room).rglob("*.py"):
            at_top = [
                node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)
            ]
            assert not [node.module for node in at_top if (node.module or "").split(".")[0] == "vllm"], path
