"""The rooms of the engine: a function names in its signature all that it may change, and nothing of another room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "rust/engine/src"

# Rooms hold parts of the engine; `verbs` puts them together, and the other files are small rooms.
ROOMS = ("fetch", "namespaces", "pins", "planner", "promotions", "remote", "residency", "writeback")
SHARED = {
    "Residency": "the state of all payloads, which every room reads and changes",
    "Operations": "operations in flight: to start one is the same for reads, writes, erasures and sums",
    "Counters": "metrics",
    "Gauges": "metrics",
    "EngineParts": "the parts that the engine lends for one call",
}
"""Types that a function of any room may take by `&mut`."""
LENT = {"residency", "shares", "operations", "checksums", "rates", "counters"}
"""The fields of `EngineParts` that it lends by `&mut`. It may lose some, and gets no further ones."""
ALLOWED = {
    ("promotions", "Share"): "a promotion counts its bytes where the request keeps them",
    ("promotions", "Rates"): "a promotion that begins or ends changes the bytes that wait for its device",
    ("remote", "RemoteRates"): "a flight that ends is a measurement",
}
"""What a room may change of another one, and why."""


def code(path: Path) -> str:
    """The file without its tests and comments."""
    return re.sub(r"//.*", "", path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod ")[0])


def sources() -> dict[Path, str]:
    found = {path: code(path) for path in ENGINE.rglob("*.rs") if path.stem != "tests"}
    assert len(found) > 40, "the engine was not found"
    return found


def room_of(path: Path) -> str | None:
    room = path.relative_to(ENGINE).parts[0].removesuffix(".rs")
    return room if room in ROOMS else None


def owners(files: dict[Path, str]) -> dict[str, str | None]:
    """Names of types, and the rooms that define them; None for those of the engine itself."""
    types = re.compile(r"^\s*pub(?:\([^)]*\))? (?:struct|enum) (\w+)", re.MULTILINE)
    return {name: room_of(path) for path, text in files.items() for name in types.findall(text)}


def changes(text: str) -> list[tuple[str, str]]:
    """Functions, each with a type that it takes by `&mut`, itself left out."""
    functions = re.finditer(r"\bfn (\w+)(?:<[^{;]*?>)?\(([^{;]*?)\)\s*(?:->[^{;]*)?[{;]", text, re.DOTALL)
    return [(found[1], name) for found in functions for name in re.findall(r"&(?:'\w+ )?mut (\w+)", found[2])]


def wrong(files: dict[Path, str]) -> list[str]:
    known = owners(files)
    return [
        f"{path.relative_to(ENGINE)}: {function} takes &mut {name}"
        for path, text in files.items()
        if (room := room_of(path)) is not None
        for function, name in changes(text)
        if name in known and known[name] != room and name not in SHARED and (room, name) not in ALLOWED
    ]


def test_a_room_changes_only_itself_and_the_shared_types() -> None:
    assert wrong(sources()) == []


def strangers(files: dict[Path, str]) -> list[str]:
    """Files outside `verbs` that name the engine or one of its verbs' files."""
    inside = {path for path in files if path.relative_to(ENGINE).parts[0] == "verbs"}
    assert len(inside) > 10, "the verbs were not found"
    door = ENGINE / "lib.rs"
    named = re.compile(r"\bEngine\b|\bverbs::")
    return [str(path.relative_to(ENGINE)) for path in files.keys() - inside - {door} if named.search(files[path])]


def test_only_verbs_know_the_engine() -> None:
    assert strangers(sources()) == []


def test_the_check_sees_a_room_that_knows_the_engine() -> None:
    files = sources()
    path = next(iter(path for path in files if room_of(path) == "planner"))
    files[path] += "\nuse super::super::verbs::Engine;\n"
    assert strangers(files) == [str(path.relative_to(ENGINE))]


def test_each_exception_is_needed() -> None:
    found = {(room_of(path), name) for path, text in sources().items() for _, name in changes(text)}
    assert set(ALLOWED) <= found
    assert {name for name in SHARED if name != "Counters"} <= {name for _, name in found}


def test_the_engine_lends_no_further_parts() -> None:
    lent = set(re.findall(r"(\w+): &'a mut ", code(ENGINE / "parts.rs")))
    assert lent <= LENT, "give the function that needs it this part by itself"


@pytest.mark.parametrize("taken", ["Engine", "Pins", "WriteBack"])
def test_the_check_sees_a_part_of_another_room(taken: str) -> None:
    files = sources()
    path = next(iter(path for path in files if room_of(path) == "planner"))
    files[path] += f"\nfn reach(of: &mut {taken}, now: u64) -> bool {{ false }}\n"
    assert wrong(files) == [f"{path.relative_to(ENGINE)}: reach takes &mut {taken}"]


def test_residency_takes_nothing_of_another_room() -> None:
    files = {path: text for path, text in sources().items() if room_of(path) == "residency"}
    known = owners(sources())
    reached = {
        name for text in files.values() for _, name in changes(text) if known.get(name) not in (None, "residency")
    }
    assert reached == set()
