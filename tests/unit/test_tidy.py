"""Rules of the tree that no compiler checks: file sizes, allowed imports, frozen classes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "rust/core/src"
MAX_LINES = 600
SOURCE_DIRECTORIES = ("rust", "python", "tests", "tools", "examples", "benches", "docs", "deploy", ".ci")
SOURCE_SUFFIXES = {".rs", ".py", ".pyi", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".service", ""}

# Modules of the core, lowest layer first; a module uses its own layer and lower ones only.
LAYERS = (
    (
        "key",
        "error",
        "explain",
        "metrics",
        "checksum",
        "cipher",
        "fork",
        "little_endian",
        "log",
        "memory",
        "panics",
        "prefetch",
        "secret",
        "size",
        "tokens",
        "work",
    ),
    ("buddy", "pool"),
    ("arena", "slots", "copy"),
    ("namespace", "forest", "resolve", "policy"),
    ("disk", "hint", "remote", "session"),
    ("engine",),
    ("driver",),
    ("embedded",),
)
# `io` stands beside the layers: files and buffers, never keys; of the others, only these.
IO_MAY_USE = {"io", "arena", "checksum", "cipher", "fork", "memory", "error", "secret"}
# Only the driver runs an IO engine; the state machine and the store speak its requests.
IO_ENGINES = {"uring", "pool", "fault", "raw"}
MAY_NAME_IO_ENGINES = {"io", "driver"}

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


def core_modules() -> dict[str, list[Path]]:
    modules: dict[str, list[Path]] = {}
    for path in CORE.rglob("*.rs"):
        name = path.relative_to(CORE).parts[0].removesuffix(".rs")
        if name != "lib":
            modules.setdefault(name, []).append(path)
    assert modules, f"no module under {CORE}"
    return modules


def production_code(path: Path) -> str:
    """The file without its test module and comments; tests may use anything."""
    if path.stem == "tests":
        return ""
    code = path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod ")[0]
    return re.sub(r"//.*", "", code)


def used_paths(path: Path) -> set[tuple[str, ...]]:
    """Paths below `crate::` that the code names, `use crate::{a::b, c}` taken apart one level deep."""
    code = production_code(path)
    found = {tuple(match.split("::")) for match in re.findall(r"\bcrate::(\w+(?:::\w+)*)", code)}
    for group in re.findall(r"\bcrate::\{([^;]*)\};", code):
        found |= {tuple(match.split("::")) for match in re.findall(r"(?:^|,)\s*(\w+(?:::\w+)*)", group)}
    return found


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


def test_every_core_module_has_a_layer() -> None:
    known = {"io"} | {name for layer in LAYERS for name in layer}
    unknown = sorted(core_modules().keys() - known)
    assert not unknown, f"give {unknown} a place in LAYERS of this file"
    gone = sorted(known - core_modules().keys())
    assert not gone, f"take {gone} out of LAYERS of this file: there is no such module"


def test_core_modules_use_lower_layers_only() -> None:
    rank = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for module, paths in core_modules().items():
        for path in paths:
            for used, *_ in used_paths(path):
                if module == "io":
                    allowed = used in IO_MAY_USE or used not in rank
                else:
                    allowed = used not in rank or rank[used] <= rank[module]
                if not allowed:
                    wrong.append(f"{path.relative_to(ROOT)} uses {used}")
    assert not wrong, f"arrows of ARCHITECTURE.md, The tree, are broken: {wrong}"


def test_io_engines_are_named_by_the_driver_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} uses {'::'.join(used)}"
        for module, paths in core_modules().items()
        if module not in MAY_NAME_IO_ENGINES
        for path in paths
        for used in used_paths(path)
        if used[0] == "io" and IO_ENGINES & set(used)
    ]
    assert not wrong, wrong


def test_the_core_knows_no_environment() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {found}"
        for path in CORE.rglob("*.rs")
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
