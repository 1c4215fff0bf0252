"""Prints numbers about the shape of the sources, to be compared between two commits.

Run it as ``python tools/structure.py``; ``--root DIR`` counts another checkout, ``--json`` prints one JSON object, and
``--checks`` runs mypy and ``cargo doc`` as well, and counts their complaints.

The file ``tools/structure.json`` holds the counts of `RATCHET`, which may only fall: a test fails when one has grown.
``--ratchet`` writes the counts that have fallen into that file, and refuses while another one is above it.

Rules of counting:

- Production Rust is ``rust/*/src`` of every crate but ``sim``, ``bench`` and ``pyo3-bench``, without files and
  directories of tests (``tests.rs``, ``tests``), and without the lines after ``#[cfg(test)] mod``.
  Comments and the contents of strings are not code.
- ``binding lines``: all lines of production Rust in ``rust/python`` (or ``rust/pyo3``).
- ``binding matches``: ``match`` and ``if let`` expressions there that name a variant for an engine in this process or
  for one in another (`VARIANTS`).
- ``widest struct``: named fields of one struct in production Rust. ``widest struct of state`` leaves out lists of
  options and of metrics (`LISTS`).
- ``attributes of the widest Python class``: names that a class of ``python/undercroft`` assigns on ``self`` or declares
  in its body with a type. Lists of options (`LISTS`) and the classes that vLLM makes (`FACADES`) do not count.
- ``files of one type``: files of ``rust/*/src``, ``sim`` too, with an ``impl`` of the type itself.
- ``longest function``: from the line of ``fn`` or ``def`` to its last line; Python counts ``python/undercroft``.
- ``option places``: lines of code (no comment, no docstring) of ``python/undercroft`` and production Rust that hold the
  name of the option `OPTION` as an identifier or a whole string.
- ``names twice``: names of structs, enums and traits that production Rust defines more than once.
- ``saturated conversions``: ``try_from(..)`` or ``try_into()`` directly followed by ``unwrap_or``,
  ``unwrap_or_default`` or ``unwrap_or_else``, in production Rust.
- ``assertions``: ``assert``, ``assert_eq``, ``assert_ne``, ``unreachable``, their ``debug_`` forms, and ``expect(``.
- ``import circles``: strongly connected sets of modules, in ``python/undercroft`` and in the sources of each Rust crate
  (``sim`` and ``bench`` too). Python counts every import, also inside functions and for type checks. Imports between a
  module and one that it lies in do not count.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
OPTION = "disk_write_rate"
VARIANTS = "Embedded|Served|Own|Owned|Owner|Local|Shared|Remote|Client"
FIELDS = 12
LINES = 70
LISTS = ("Config", "Counters", "Gauges")
FACADES = ("UndercroftConnector", "UndercroftTier")
SPREAD = ("Residency", "Engine", "World", "Remote")
NOT_PRODUCTION = {"sim", "bench", "pyo3-bench"}
BINDINGS = {"python", "pyo3"}

RATCHET = (
    "widest struct of state",
    f"structs over {FIELDS} fields",
    "lines of the longest Rust function",
    f"Rust functions over {LINES} lines",
    "lines of the longest Python function",
    f"Python functions over {LINES} lines",
    "attributes of the widest Python class",
    "type names that exist twice",
    "saturated conversions",
    "import circles",
    "public methods of Engine",
    *(f"files of {name}" for name in SPREAD),
)
RATCHET_FILE = Path(__file__).with_suffix(".json")

_STRING_OR_COMMENT = re.compile(
    r"""
      (?P<comment>//[^\n]*|/\*.*?\*/)
    | (?P<raw>b?r(?P<hashes>\#*)".*?"(?P=hashes))
    | (?P<string>b?"(?:\\.|[^"\\])*")
    | (?P<char>b?'(?:\\[^\n']+|[^'\\\n])')
    """,
    re.DOTALL | re.VERBOSE,
)


def rust_code(text: str, strings: bool = False) -> str:
    """The text with comments blanked, and the contents of strings too unless ``strings``; lines stay where they are."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        if match["comment"] is None and strings:
            return found
        filler = "" if match["comment"] is not None else '""'
        return filler + "\n" * found.count("\n")

    return _STRING_OR_COMMENT.sub(blank, text)


def without_tests(text: str) -> str:
    """A Rust file up to its test module."""
    return re.split(r"#\[cfg\((?:all\()?test[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))? )?mod ", text)[0]


def production_rust(root: Path) -> dict[Path, str]:
    """Production Rust: file -> its text up to the test module."""
    found = {}
    for crate in sorted((root / "rust").iterdir()):
        if crate.name in NOT_PRODUCTION:
            continue
        for path in sorted((crate / "src").rglob("*.rs")):
            inside = path.relative_to(crate / "src")
            if path.stem != "tests" and "tests" not in inside.parts:
                found[path.relative_to(root)] = without_tests(path.read_text(encoding="utf-8"))
    return found


def block_after(code: str, start: int) -> tuple[int, int] | None:
    """Where the first ``{`` after ``start`` is and its ``}``; None if a ``;`` comes before, as in a declaration."""
    depth = 0
    for at in range(start, len(code)):
        if code[at] in "([":
            depth += 1
        elif code[at] in ")]":
            depth -= 1
        elif depth == 0 and code[at] == ";":
            return None
        elif depth == 0 and code[at] == "{":
            braces = 0
            for end in range(at, len(code)):
                braces += {"{": 1, "}": -1}.get(code[end], 0)
                if braces == 0:
                    return at, end
            return None
    return None


def structs(code: str) -> Iterator[tuple[str, int]]:
    """Each struct with named fields, and how many they are."""
    for match in re.finditer(r"\bstruct (\w+)", code):
        block = block_after(code, match.end())
        if block is None:
            continue
        inner, depth, flat = code[block[0] + 1 : block[1]], 0, []
        for one in inner:
            depth -= one in ")]}"
            flat.append(one if depth == 0 else " ")
            depth += one in "([{"
        yield match[1], len(re.findall(r"(?<!:)\b\w+\s*:(?!:)", "".join(flat)))


def functions(code: str) -> Iterator[tuple[str, int]]:
    """Each function that has a body, and its lines."""
    for match in re.finditer(r"\bfn (\w+)", code):
        block = block_after(code, match.end())
        if block is not None:
            yield match[1], code.count("\n", match.start(), block[1]) + 1


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Each function of a Python file, and its lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def python_classes(text: str) -> Iterator[tuple[str, int]]:
    """Each class of a Python file, and the number of its attributes: those of a class inside it are its own."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield node.name, len(set(_attributes(node.body)))


def _attributes(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(statement):
            match node:
                case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                    yield name


def mode_matches(code: str) -> int:
    """Expressions that decide by where the engine runs."""
    count = 0
    for match in re.finditer(r"\bmatch\b", code):
        block = block_after(code, match.end())
        if block and re.search(rf"\b\w+::(?:{VARIANTS})\b[^;{{]*=>", code[block[0] : block[1]]):
            count += 1
    return count + len(re.findall(rf"\blet \w+::(?:{VARIANTS})\b", code))


def saturated(code: str) -> int:
    """Conversions that turn a number that does not fit into another one."""
    flat = re.sub(r"\s+", "", code)
    count = 0
    for match in re.finditer(r"\btry_(?:from|into)\(", flat):
        depth, at = 1, match.end()
        while depth and at < len(flat):
            depth += {"(": 1, ")": -1}.get(flat[at], 0)
            at += 1
        count += flat.startswith(".unwrap_or", at)
    return count


def option_places(root: Path, rust: Mapping[Path, str], option: str) -> list[str]:
    """``file:line`` of each line of code that holds the option."""
    found = []
    for path, text in rust.items():
        for number, line in enumerate(rust_code(text, strings=True).splitlines(), 1):
            if re.search(rf"\b{option}\b", line):
                found.append(f"{path}:{number}")
    for path in python_files(root, stubs=True):
        text = path.read_text(encoding="utf-8")
        numbers: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            names = {getattr(node, field, None) for field in ("id", "attr", "arg", "value")}
            if any(isinstance(name, str) and name == option for name in names):
                numbers.add(node.lineno)
        found += [f"{path.relative_to(root)}:{number}" for number in sorted(numbers)]
    return found


def python_files(root: Path, stubs: bool = False) -> list[Path]:
    """The files of the package."""
    package = root / "python/undercroft"
    return sorted([*package.rglob("*.py"), *(package.rglob("*.pyi") if stubs else ())])


def python_imports(root: Path) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports."""
    base = root / "python"
    modules = {}
    for path in python_files(root):
        parts = path.relative_to(base).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                used = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                below = [f"{node.module}.{alias.name}" for alias in node.names]
                used = [one if one in modules else node.module for one in below]
            else:
                continue
            graph[name].update(one for one in used if one in modules and not _related(one, name, "."))
    return graph


def rust_imports(crate: Path) -> dict[str, set[str]]:
    """Module -> modules of the crate that it names."""
    source = crate / "src"
    modules: dict[tuple[str, ...], str] = {}
    for path in sorted(source.rglob("*.rs")):
        parts = path.relative_to(source).with_suffix("").parts
        if "tests" in parts:
            continue
        name = parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts
        modules[name] = rust_code(without_tests(path.read_text(encoding="utf-8")))
    graph: dict[str, set[str]] = {"::".join(name) or "lib": set() for name in modules}
    for name, code in modules.items():
        for used in _rust_paths(code):
            parts = used
            if parts[0] == "crate":
                parts = parts[1:]
            elif parts[0] == "self":
                parts = (*name, *parts[1:])
            else:
                above = len([part for part in parts if part == "super"])
                parts = (*name[: max(0, len(name) - above)], *parts[above:])
            while parts and parts not in modules:
                parts = parts[:-1]
            one, other = "::".join(parts) or "lib", "::".join(name) or "lib"
            if parts and name and not _related(one, other, "::"):
                graph[other].add(one)
    return graph


def _rust_paths(code: str) -> Iterator[tuple[str, ...]]:
    """Paths that begin with crate, self or super, with groups in braces taken apart."""
    for match in re.finditer(r"\b(?:crate|self|super)(?:::(?:\w+))*(?:::\{)?", code):
        text = match[0]
        if not text.endswith("::{"):
            if "::" in text:
                yield tuple(text.split("::"))
            continue
        depth, at = 1, match.end()
        while depth and at < len(code):
            depth += {"{": 1, "}": -1}.get(code[at], 0)
            at += 1
        yield from _expand(tuple(text[:-3].split("::")), code[match.end() : at - 1])


def _expand(prefix: tuple[str, ...], group: str) -> Iterator[tuple[str, ...]]:
    depth, start = 0, 0
    for at, one in enumerate(group + ","):
        depth += {"{": 1, "}": -1}.get(one, 0)
        if one == "," and depth == 0:
            item = group[start:at].strip()
            start = at + 1
            head, brace, rest = item.partition("::{")
            names = tuple(part for part in head.split("::") if part and part != "self")
            if brace:
                yield from _expand(prefix + names, rest.rsplit("}", 1)[0])
            elif item:
                yield prefix + names


def _related(one: str, other: str, separator: str) -> bool:
    """Whether one of the modules is, or lies in, the other."""
    return one == other or one.startswith(other + separator) or other.startswith(one + separator)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of more than one module that all reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        left = [start]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        reach[start] = seen
    sets = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return sorted(sorted(one) for one in sets if len(one) > 1)


def mypy_errors(root: Path) -> int:
    """Errors of mypy in the package, by the settings of this checkout, which are strict."""
    settings = ["--config-file", str(HERE / "pyproject.toml"), "--no-error-summary", "--no-pretty"]
    command = [sys.executable, "-m", "mypy", *settings, "python/undercroft"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1):
        raise SystemExit(f"mypy failed: {result.stderr or result.stdout}")
    return len(re.findall(r": error:", result.stdout))


def doc_warnings(root: Path) -> int:
    """Warnings of ``cargo doc``."""
    command = ["cargo", "doc", "--workspace", "--no-deps", "--message-format", "json"]
    environment = {name: value for name, value in os.environ.items() if name != "RUSTDOCFLAGS"}
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise SystemExit(f"cargo doc failed: {result.stderr}")
    messages = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    spans = [one["message"] for one in messages if one["reason"] == "compiler-message"]
    return sum(one["level"] == "warning" and bool(one["spans"]) for one in spans)


def measure(root: Path) -> dict[str, Any]:
    """All numbers that need no other tool."""
    rust = production_rust(root)
    code = {path: rust_code(text) for path, text in rust.items()}
    binding = [path for path in rust if path.parts[1] in BINDINGS]
    every_struct = [(fields, name, path) for path, one in code.items() for name, fields in structs(one)]
    every_function = [(lines, name, path) for path, one in code.items() for name, lines in functions(one)]
    every_python = [
        (lines, name, path.relative_to(root))
        for path in python_files(root)
        for name, lines in python_functions(path.read_text(encoding="utf-8"))
    ]
    every_class = [
        (attributes, name, path.relative_to(root))
        for path in python_files(root)
        for name, attributes in python_classes(path.read_text(encoding="utf-8"))
        if not name.endswith(LISTS) and name not in FACADES
    ]
    types = Counter(name for one in code.values() for name in re.findall(r"\b(?:struct|enum|trait) (\w+)", one))
    whole = "\n".join(code.values())
    kinds = {
        "assert": r"(?<!debug_)\bassert(?:_eq|_ne)?!",
        "debug_assert": r"\bdebug_assert(?:_eq|_ne)?!",
        "unreachable": r"\bunreachable!",
        "expect": r"\.expect\(",
    }
    asserts = {name: len(re.findall(pattern, whole)) for name, pattern in kinds.items()}
    graphs = {"python": python_imports(root)}
    graphs |= {f"rust/{crate.name}": rust_imports(crate) for crate in sorted((root / "rust").iterdir())}
    found = [f"{name}: {' <-> '.join(circle)}" for name, graph in graphs.items() for circle in circles(graph)]
    return {
        "binding lines": sum(rust[path].count("\n") for path in binding),
        "binding matches on embedded or served": sum(mode_matches(code[path]) for path in binding),
        "fields of the widest struct": _worst(every_struct),
        "widest struct of state": _worst([one for one in every_struct if not one[1].endswith(LISTS)]),
        f"structs over {FIELDS} fields": [f"{name} {fields}" for fields, name, _ in every_struct if fields > FIELDS],
        "lines of the longest Rust function": _worst(every_function),
        f"Rust functions over {LINES} lines": [f"{name} {lines}" for lines, name, _ in every_function if lines > LINES],
        "lines of the longest Python function": _worst(every_python),
        f"Python functions over {LINES} lines": [f"{name} {lines}" for lines, name, _ in every_python if lines > LINES],
        "attributes of the widest Python class": _worst(every_class),
        f"places of {OPTION}": option_places(root, rust, OPTION),
        "type names that exist twice": sorted(f"{name} {count}" for name, count in types.items() if count > 1),
        "saturated conversions": sum(saturated(one) for one in code.values()),
        "assertions": {"all": sum(asserts.values()), **asserts},
        "import circles": found,
        "public methods of Engine": public_methods(code, "Engine"),
        **{f"files of {name}": files for name, files in files_of(root, SPREAD).items()},
    }


def inherent(name: str) -> str:
    """A pattern for the head of a block with a type's own methods."""
    return rf"(?m)^impl(?:<[^>]*>)? {name}(?:<[^>]*>)? \{{"


def files_of(root: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """By type, the files that hold its methods, or those of another type of that name."""
    sources = sorted(root.glob("rust/*/src/**/*.rs"))
    texts = [(path.relative_to(root), rust_code(path.read_text(encoding="utf-8"))) for path in sources]
    return {name: [str(path) for path, one in texts if re.search(inherent(name), one)] for name in names}


def public_methods(code: Mapping[Path, str], name: str) -> int:
    """Public methods of a type of the engine."""
    count = 0
    for path, one in code.items():
        for match in re.finditer(inherent(name), one) if path.parts[1] == "engine" else ():
            block = block_after(one, match.end() - 1)
            count += len(re.findall(r"(?m)^    pub (?:const )?fn ", one[slice(*block)])) if block else 0
    return count


def size(value: Any) -> int:
    """A number of `measure` as one count."""
    if isinstance(value, list):
        return len(value)
    return int(value["count"]) if isinstance(value, dict) else int(value)


def grown(numbers: Mapping[str, Any], limits: Mapping[str, int]) -> list[str]:
    """A line for each count that is above its limit."""
    return [
        f"{name}: {text(numbers[name])}, but at most {limit}"
        for name, limit in limits.items()
        if size(numbers[name]) > limit
    ]


def _worst(found: list[tuple[int, str, Path]]) -> dict[str, Any]:
    count, name, path = max(found)
    return {"count": count, "name": name, "file": str(path)}


def text(value: Any) -> str:
    """A number for people: the count first, then the counted things."""
    if isinstance(value, list):
        return f"{len(value)}" + (f"  ({', '.join(value)})" if value else "")
    if isinstance(value, dict) and "name" in value:
        return f"{value['count']}  ({value['name']} in {value['file']})"
    if isinstance(value, dict):
        return f"{value['all']}  ({', '.join(f'{name} {count}' for name, count in value.items() if name != 'all')})"
    return str(value)


def main() -> int:
    """Print the numbers."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--root", type=Path, default=HERE, metavar="DIR", help="checkout to count (this one)")
    parser.add_argument("--checks", action="store_true", help="run mypy and cargo doc too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ratchet", action="store_true", help="write the counts that have fallen into structure.json")
    args = parser.parse_args()
    root = args.root.resolve()
    if not (root / "rust").is_dir():
        parser.error(f"--root {args.root}: no checkout of undercroft, there is no rust/ in it")
    numbers = measure(root)
    if args.checks:
        numbers["errors of mypy"] = mypy_errors(root)
        numbers["warnings of cargo doc"] = doc_warnings(root)
    if args.ratchet:
        old = json.loads(RATCHET_FILE.read_text(encoding="utf-8")) if RATCHET_FILE.exists() else {}
        if above := grown(numbers, {name: limit for name, limit in old.items() if name in RATCHET}):
            print("\n".join(["error: these counts have grown:", *above]), file=sys.stderr)
            return 1
        RATCHET_FILE.write_text(json.dumps({name: size(numbers[name]) for name in RATCHET}, indent=2) + "\n", "utf-8")
    elif args.json:
        print(json.dumps(numbers, indent=2))
    else:
        width = max(map(len, numbers))
        for name, value in numbers.items():
            print(f"{name:<{width}}  {text(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
