"""The documents name existing things only: paths, links, options, metrics, commands, targets, identifiers, numbers."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from undercroft.cli.main import build_parser
from undercroft.config import OPTIONS
from undercroft.metrics import METRICS, PREFIX, SERVER_METRICS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "deploy/README.md",
        *(ROOT / "benches").glob("*.md"),
    )
)
# Written from the code: `test_reference.py` compares them.
GENERATED = {f"docs/reference/{page}.md" for page in ("cli", "metrics", "options")}
SOURCES = {".rs", ".py", ".pyi", ".toml", ".txt", ".service", ".json", ""}
SUFFIXES = r"\.(?:rs|py|pyi|md|toml|txt|service|so)"

# Names of others: vLLM, CUDA, the kernel, the shell. A name that is neither here nor in the sources is a mistake.
FOREIGN = {"AWS_ALLOW_INVALID_CERTIFICATES", "LOAD", "LOOKUP", "SAVE", "PyO3"} | {
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AllBlocksCleared",
    "BHLNC",
    "BLNHC",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "LBNHC",
    "LHBNC",
    "MAX_JOBS",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TieringOffloadingSpec",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_PLUGINS",
    "XDG_RUNTIME_DIR",
    "block_size",
    "cache_threshold",
    "cached_tokens",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "expandable_segments",
    "extra_keys",
    "find_longest_cache_hit",
    "gpu_memory_utilization",
    "kv_offload_tiering_read_bytes",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "kv_connector",
    "kv_connector_extra_config",
    "kv_role",
    "metrics_path",
    "prefix_cache_retention_interval",
    "request_finished",
    "spec_module_path",
    "swap_blocks_batch",
    "vllm_undercroft_",
    # nginx and Envoy
    "error_page",
    "previous_hosts",
    "proxy_intercept_errors",
    "proxy_next_upstream",
    "retriable_status_codes",
    "retry_on",
}
OFFLOADING_KEYS = {"spec_name", "cpu_bytes_to_use", "secondary_tiers", "type", "module_path"}
"""Keys of vLLM's offloading, which may have undercroft as a tier."""
FOREIGN_FLAGS = {
    "--example",
    "--unfreeze",
    "--offline",
    "--bench",
    "--block-size",
    "--data-parallel-rank",
    "--data-parallel-size",
    "--enable-prompt-tokens-details",
    "--enable-expert-parallel",
    "--enable-return-routed-experts",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--hf-overrides",
    "--ipc",
    "--kv-connector",
    "--kv-offloading-size",
    "--kv-events-config",
    "--kv-transfer-config",
    "--locked",
    "--lora-target-modules",
    "--mamba-block-size",
    "--max-model-len",
    "--max-num-seqs",
    "--num-gpu-blocks-override",
    "--pipeline-parallel-size",
    "--prefix-caching-hash-algo",
    "--prefix-match-unit",
    "--release",
    "--sse-keep-alive-interval",
    "--test",
    "--trust-remote-code",
    "--ulimit",
}

SGLANG_FLAGS = {
    "--enable-hierarchical-cache",
    "--enable-metrics",
    "--hicache-mem-layout",
    "--hicache-ratio",
    "--hicache-size",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
    "--hicache-storage-prefetch-policy",
    "--hicache-write-policy",
    "--json-model-override-args",
    "--lora-paths",
    "--model-path",
    "--quantization",
    "--trust-mm-content-hashes",
}
"""`tests/sglang` checks that SGLang has them."""


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def quoted(document: str) -> Iterator[str]:
    """Texts between backticks within a line or over a line's end, code blocks left out."""
    prose = re.sub(r"```.*?```", "", text(document), flags=re.DOTALL)
    for found in re.findall(r"`([^`]+)`", prose):
        yield " ".join(found.split())


def commands(document: str, name: str) -> Iterator[str]:
    """Lines of code that begin with a command, joined where a backslash ends them, and quoted ones."""
    for block in re.findall(r"```.*?\n(.*?)```", text(document), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith(f"{name} "):
                yield line.partition("#")[0]
    yield from (one for one in quoted(document) if one.startswith(f"{name} "))


COPIED = (
    "README.md",
    *(f"docs/{page}.md" for page in ("index", "get-started", "configure", "vllm", "vllm-tier", "sglang")),
)
"""Pages whose code blocks a newcomer copies."""
COLUMNS = 84
"""What a page of the site shows of a code block in a window of 1,280 pixels."""


@pytest.mark.parametrize("document", COPIED)
def test_commands_to_copy_are_seen_whole(document: str) -> None:
    blocks = re.findall(r"```.*?\n(.*?)```", text(document), flags=re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > COLUMNS] == []


@cache
def files() -> frozenset[str]:
    """Files that are or may be committed, and their directories."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    names = {name for name in listing if (ROOT / name).exists()}
    if not names:  # no git here: every file in our directories
        ours = ("rust", "python", "tests", "tools", "examples", "benches", "docs", "deploy", ".ci", ".config")
        names = {path.relative_to(ROOT).as_posix() for top in ours for path in (ROOT / top).rglob("*")}
        names |= {path.name for path in ROOT.iterdir() if path.is_file()}
    parents = {parent.as_posix() + "/" for name in names for parent in Path(name).parents}
    return frozenset(names | parents | {parent.rstrip("/") for parent in parents})


@cache
def identifiers() -> frozenset[str]:
    """Every word of the sources, this file excepted, with the names of files and metrics."""
    words: set[str] = {Path(name).stem for name in files()}
    for metric in (*METRICS, *SERVER_METRICS):
        words |= {metric.name, f"{metric.name}_total", f"undercroft_{metric.name}", f"undercroft_{metric.name}_total"}
    for path in (ROOT / name for name in files()):
        ours = path.suffix in SOURCES and path != Path(__file__).resolve() and "corpus" not in path.parts
        if ours and path.is_file():
            words.update(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(words)


@cache
def flags_of_commands() -> dict[tuple[str, ...], set[str]]:
    """Subcommand -> its flags."""
    found: dict[tuple[str, ...], set[str]] = {}

    def walk(parser: argparse.ArgumentParser, name: tuple[str, ...]) -> None:
        found[name] = {flag for action in parser._actions for flag in action.option_strings}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for below, one in action.choices.items():
                    walk(one, (*name, below))

    walk(build_parser("bench"), ())
    return found


def flags_of_tools() -> set[str]:
    """Flags of the scripts and of the other programs of this checkout."""
    places = [ROOT / top for top in ("tools", "benches", "examples", "tests", "rust")]
    paths = [path for place in places for path in (*place.rglob("*.py"), *place.rglob("*.rs"))]
    sources = (path.read_text(encoding="utf-8") for path in paths if path != Path(__file__).resolve())
    return {flag for source in sources for flag in re.findall(r'"(--[a-z][\w-]*)"', source)}


def missing_paths(document: str) -> set[str]:
    known = files()
    missing = set()
    for one in quoted(document):
        if not re.fullmatch(rf"[\w./-]+(?:{SUFFIXES}|/)", one) or one.startswith(("/", "..")):
            continue
        if one not in known and not any(name.endswith("/" + one) for name in known):
            missing.add(one)
    return missing


def missing_links(document: str) -> set[str]:
    missing = set()
    for target in re.findall(r"\]\(([^)\s]+)\)", text(document)):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:|mailto:", target):
            continue
        file = (ROOT / document).parent / path if path else ROOT / document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            missing.add(target)
    return missing


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def unknown_identifiers(document: str) -> set[str]:
    """Quoted names in snake_case, CamelCase or capitals that no source has; of ARCHITECTURE.md, in diagrams too."""
    unknown = set()
    blocks = re.findall(r"```\n(.*?)```", text(document), flags=re.DOTALL) if document == "ARCHITECTURE.md" else []
    for one in (*quoted(document), *blocks):
        for word in re.findall(r"(?<![\w/.-])[A-Za-z]\w+(?:(?:::|\.)\w+)*", one):
            for part in re.split(r"::|\.", word):
                named = "_" in part.strip("_") or re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}|[A-Z]{4,}", part)
                # Up to a dollar, a star or a bracket a name is only the beginning of one.
                if named and part not in identifiers() | FOREIGN and not re.search(rf"{part}[<*{{]|[<*}}]{part}", one):
                    unknown.add(part)
    return unknown


def unknown_options(document: str) -> set[str]:
    """Keys given to the connector, and environment variables, that are no options."""
    names = {option.name for option in OPTIONS} | OFFLOADING_KEYS
    keys = {
        key
        for block in re.findall(r'"kv_connector_extra_config":\s*\{([^}]*)\}', text(document))
        for key in re.findall(r'"(\w+)":', block)
    }
    variables = {name.lower() for name in re.findall(r"\bUNDERCROFT_([A-Z_]+)\b", text(document))}
    tests = {word.removeprefix("UNDERCROFT_").lower() for word in identifiers() if word.startswith("UNDERCROFT_")}
    return (keys - names) | (variables - names - tests)


def unknown_metrics(document: str) -> set[str]:
    known = {
        PREFIX + metric.name + ("_total" if metric.kind == "counter" else "") for metric in (*METRICS, *SERVER_METRICS)
    }
    return {name for name in re.findall(rf"\b{re.escape(PREFIX)}\w+", text(document)) if name not in known}


def unknown_commands(document: str) -> set[str]:
    """Subcommands and flags of ``undercroft`` that it does not have."""
    known, wrong = flags_of_commands(), set()
    for line in commands(document, "undercroft"):
        words = line.split()[1:]
        names: tuple[str, ...] = ()
        while words and all((*names, one) in known for one in words[0].replace("\\|", "|").split("|")):
            several = words.pop(0).replace("\\|", "|").split("|")
            names = (*names, several[0])
        for word in words:
            flag = re.match(r"\[?(--[a-z][\w-]*)", word)
            if flag and flag[1] not in known[names]:
                wrong.add(f"undercroft {' '.join(names)} {flag[1]}")
        if not names and words and not words[0].startswith(("-", "[")):
            wrong.add(f"undercroft {words[0]}")
        if names and not words and any(len(one) > len(names) and one[: len(names)] == names for one in known):
            continue  # a group of commands, named as a whole
        if names == ("bench",) and words and not words[0].startswith("-"):
            wrong.add(f"undercroft bench {words[0]}")
    return wrong


def unknown_flags(document: str) -> set[str]:
    """Flags that neither ``undercroft`` nor a script of this checkout nor a program named above has."""
    known = set.union(*flags_of_commands().values()) | flags_of_tools() | FOREIGN_FLAGS | SGLANG_FLAGS
    return {flag for flag in re.findall(r"(?<![\w-])(--[a-z][\w-]*)", text(document)) if flag not in known}


def unknown_targets(document: str) -> set[str]:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {line.split()[1] for line in commands(document, "make")}
    return {name for name in named if re.fullmatch(r"[a-z0-9-]+", name) and name not in targets}


CHECKS = {
    "paths": missing_paths,
    "links": missing_links,
    "identifiers": unknown_identifiers,
    "options": unknown_options,
    "metrics": unknown_metrics,
    "commands": unknown_commands,
    "flags": unknown_flags,
    "targets": unknown_targets,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("document", [one for one in DOCUMENTS if one not in GENERATED])
def test_names_in_documents_exist(document: str, check: str) -> None:
    wrong = CHECKS[check](document)
    assert not wrong, f"{document}, {check}: there is no {', '.join(sorted(wrong))}"


MISTAKES = {
    "paths": ("see `rust/engine/src/nowhere.rs`", "rust/engine/src/nowhere.rs"),
    "links": ("see [there](docs/nowhere.md)", "docs/nowhere.md"),
    "identifiers": ("calls `Engine::no_such_verb`", "no_such_verb"),
    "options": ('```\n"kv_connector_extra_config": {"host_memmory": 1}\n```', "host_memmory"),
    "metrics": ("`vllm:undercroft_hit_tokens`", "vllm:undercroft_hit_tokens"),
    "commands": ("```\nundercroft serve --sokket X\n```", "undercroft serve --sokket"),
    "flags": ("start it with `--no-such-flag`", "--no-such-flag"),
    "targets": ("run `make everything`", "everything"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_sees_a_mistake(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, found = MISTAKES[check]
    monkeypatch.setitem(globals(), "text", lambda document: written)
    assert CHECKS[check]("README.md") == {found}


def test_the_architecture_takes_ten_minutes() -> None:
    assert len(text("ARCHITECTURE.md").split()) <= 2000, "move details to docs/internals/"


def test_there_are_documents() -> None:
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/server.md"} <= set(DOCUMENTS)


def test_the_types_to_begin_with_have_examples() -> None:
    (paragraph,) = re.findall(r"The types to begin with.*?(?=\n\n)", text("CONTRIBUTING.md"), flags=re.DOTALL)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "rust").glob("*/src/**/*.rs"))
    names = re.findall(r"`([A-Z]\w+)`", paragraph)
    documented = {
        name
        for name in names
        if re.search(rf"/// ```\n(?:(?:///|#\[).*\n)*pub (?:struct|enum|trait) {name}\b", sources)
    }
    assert (len(names), documented) == (14, set(names))
