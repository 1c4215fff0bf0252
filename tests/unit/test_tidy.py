"""Rules of the tree that no compiler checks: file sizes, allowed imports, frozen classes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUST = ROOT / "rust"
MAX_LINES = 600
SOURCE_DIRECTORIES = ("rust", "python", "tests", "tools", "examples", "benches", "docs", "deploy", ".ci")
SOURCE_SUFFIXES = {".rs", ".py", ".pyi", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".service", ""}

# Crates in the order of knowledge: a crate depends on those that it lists, and on no other of ours.
KNOWS = {
    "contract": set(),
    "io": {"contract"},
    "engine": {"contract"},
    "cipher": {"contract", "io"},
    "driver": {"contract", "io", "engine"},
    "remote": {"contract", "io"},
    "ipc": {"contract", "io", "engine", "driver"},
    "host": {"contract", "io", "engine", "cipher", "driver", "remote", "ipc"},
}
# These two make no system call: the simulator decides everything that happens to an engine. The checksum measures once
# which routine of the processor is the fastest.
WITHOUT_SYSTEM = ("contract", "engine")
OF_THE_SYSTEM = {"io-uring", "libc", "nix", "rustix", "tokio"}
MAY_ASK_SYSTEM = {"rust/contract/src/checksum.rs": {"time"}, "rust/contract/src/log.rs": {"time"}}
# Modules of the engine below its rooms, lowest layer first; a module uses its own layer and lower ones only.
LAYERS = (("buddy", "metrics", "pool", "resolve", "work"), ("forest", "slots"), ("policy",), ("disk",))
# An IO engine knows files and buffers, but no keys of blocks: of the contract only these.
IO_MAY_USE = {"checksum", "cipher", "io", "size"}

# Pieced together, so that this file does not hold them.
FORBIDDEN = [re.escape(a + b) for a, b in (("pypi", ".org"), ("pythonhosted", ".org"), ("crates", ".io"))]
FORBIDDEN += [rf"(?<![\w.]){re.escape(a + b)}" for a, b in (("/wo", "rk/"), ("/ro", "ot/"), ("/tmp/", "wt"))]


def sources() -> list[Path]:
    files = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in {".md", ".toml"}]
    files.append(ROOT / "Makefile")
    for name in SOURCE_DIRECTORIES:
        files += [path for path in (ROOT / name).rglob("*") if path.is_file() and path.suffix in SOURCE_SUFFIXES]
    files = [path for path in files if not {"__pycache__", "corpus"}.intersection(path.parts)]
    assert len(files) > 20, f"the walk found only {len(files)} files: has the tree moved?"
    return files


def production_code(path: Path) -> str:
    """The file without its test module and comments; tests may use anything."""
    if path.stem == "tests":
        return ""
    code = path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod ")[0]
    return re.sub(r"//.*", "", code)


def used_modules(path: Path, crate: str = "crate") -> set[str]:
    """Modules of a crate that the code names, `use crate::{a::b, c}` taken apart one level deep."""
    code = production_code(path)
    found = set(re.findall(rf"\b{crate}::(\w+)", code))
    for group in re.findall(rf"\b{crate}::\{{([^;]*)\}};", code):
        found |= set(re.findall(r"(?:^|,)\s*(\w+)", group))
    return found


def dependencies(crate: str) -> set[str]:
    """The crates that a crate depends on, except for its tests."""
    manifest = tomllib.loads((RUST / crate / "Cargo.toml").read_text(encoding="utf-8"))
    return set(manifest["dependencies"])


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources()
        if path.suffix in {".rs", ".py"} and (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines, split them: {long}"


def test_no_machine_is_named() -> None:
    pattern = re.compile("|".join(FORBIDDEN))
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not named, "package hosts and paths of one machine do not belong here:\n" + "\n".join(named)


@pytest.mark.parametrize("crate", KNOWS)
def test_a_crate_knows_those_below_it_only(crate: str) -> None:
    ours = {name.removeprefix("undercroft-") for name in dependencies(crate) if name.startswith("undercroft-")}
    assert ours <= KNOWS[crate], "arrows of ARCHITECTURE.md, The tree, are broken"


@pytest.mark.parametrize("crate", WITHOUT_SYSTEM)
def test_the_engine_makes_no_system_call(crate: str) -> None:
    assert not dependencies(crate) & OF_THE_SYSTEM
    for path in (RUST / crate / "src").rglob("*.rs"):
        asked = set(re.findall(r"\bstd::(env|fs|net|os|process|thread|time)\b", production_code(path)))
        # A duration is a number.
        asked -= {"time"} if "std::time::Duration" in production_code(path) else set()
        name = path.relative_to(ROOT).as_posix()
        assert asked <= MAY_ASK_SYSTEM.get(name, set()), name


def test_modules_below_the_rooms_use_lower_layers_only() -> None:
    rank = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    engine, wrong = RUST / "engine/src", []
    for module in rank:
        paths = [*engine.glob(f"{module}.rs"), *(engine / module).rglob("*.rs")]
        assert paths, f"take {module} out of LAYERS of this file: there is no such module"
        for path in paths:
            wrong += [
                f"{path.relative_to(ROOT)} uses {used}"
                for used in used_modules(path)
                if rank.get(used, len(LAYERS)) > rank[module]
            ]
    assert not wrong, f"the rooms of the engine are built on these modules: {wrong}"


def test_io_engines_know_no_keys() -> None:
    paths = [path for path in (RUST / "io/src").rglob("*.rs") if "disk" not in path.parts]
    assert len(paths) > 20, "the IO engines were not found"
    wrong = {
        f"{path.relative_to(ROOT)}: {used}"
        for path in paths
        for used in used_modules(path, "undercroft_contract") - IO_MAY_USE
    }
    assert not wrong, wrong


def test_the_crates_below_the_host_know_no_environment() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {found}"
        for crate in ("contract", "io", "engine", "driver")
        for path in (RUST / crate / "src").rglob("*.rs")
        for found in re.findall(r"\bstd::env::\w+|\bpyo3\b|\btokio\b", production_code(path))
    ]
    assert not wrong, wrong


def test_python_classes_are_frozen() -> None:
    """A frozen class is borrowed without a run-time check, so that no call can fail because of another."""
    paths = [path for crate in ("pyo3", "pyo3-bench") for path in (ROOT / "rust" / crate / "src").rglob("*.rs")]
    assert paths, "no binding found: has it moved?"
    loose = []
    for path in paths:
        code = path.read_text(encoding="utf-8")
        for match in re.finditer(r"(// not frozen: .*\n\s*)?#\[pyclass(\([^\]]*\))?\]", code):
            if "frozen" not in (match[2] or "") and match[1] is None:
                loose.append(f"{path.relative_to(ROOT)}:{code[: match.start()].count(chr(10)) + 1}")
    assert not loose, f"add `frozen`, or a line `// not frozen: reason` above: {loose}"
