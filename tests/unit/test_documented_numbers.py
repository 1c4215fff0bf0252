"""Numbers that documents state are those of the sources, and `unsafe` is where CONTRIBUTING says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_check import interference, speed

from undercroft.config import OPTIONS
from undercroft.device import api, cuda, lane, memcpy, pinning

ROOT = Path(__file__).resolve().parents[2]
PRODUCTION = [
    path
    for crate in sorted((ROOT / "rust").iterdir())
    if crate.name not in ("sim", "bench", "pyo3-bench")
    for path in sorted((crate / "src").rglob("*.rs"))
    if path.stem != "tests"
]
WORDS = {3: "three", 5: "five", 10: "ten", 16: "sixteen", 30: "half a minute", 60: "a minute"}
MS, SECOND = 10**6, 10**9


def constant(name: str, place: str = "") -> int:
    """The value of a Rust constant; a duration in nanoseconds. ``place``: part of the path, where several have it."""
    found = [
        (path, match[1])
        for path in PRODUCTION
        if place in path.as_posix()
        for match in re.finditer(rf"\bconst {name}: [\w:]+ = ([^;]+);", path.read_text(encoding="utf-8"))
    ]
    assert len(found) == 1, f"{name} is defined {len(found)} times: {found}"
    path, expression = found[0]
    units = {"from_nanos": 1, "from_micros": 1000, "from_millis": MS, "from_secs": SECOND}
    expression = re.sub(r"Duration::(\w+)\(", lambda match: f"{units[match[1]]} * (", expression)
    expression = re.sub(r"(?<=[0-9a-f])_(?=[0-9a-f])", "", expression)

    def other(match: re.Match[str]) -> str:
        near = re.search(rf"\bconst {match[1]}:", path.read_text(encoding="utf-8"))
        return str(constant(match[1], path.as_posix() if near else ""))

    expression = re.sub(r"(?:\w+::)*\b([A-Z][A-Z_]+)\b", other, expression)
    assert re.fullmatch(r"[0-9a-fx+*/<>() -]+", expression), f"{name} = {expression} is no number"
    return int(eval(expression))


def python_constant(name: str) -> int:
    """The same of the Python package."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "python/undercroft").rglob("*.py"))
    [value] = [one for source in sources for one in re.findall(rf"^{name} = ([0-9.]+)$", source, re.MULTILINE)]
    return int(float(value))


def lane_bytes() -> int:
    """Device memory of all lanes."""
    return 2 * lane.STAGING_BYTES + lane.UNPINNED_STAGING_BYTES


def gpu_check_seconds() -> float:
    [value] = re.findall(r"^LONGEST_S = (.+)$", (ROOT / "tools/gpu_check/__main__.py").read_text(), re.MULTILINE)
    return float(value)


def option(name: str) -> str:
    [default] = [one.default for one in OPTIONS if one.name == name]
    return str(default)


def recorded(heading: str, column: int) -> dict[str, list[float]]:
    """The numbers of a column of the first table below a heading of the lab records, by the first cells."""
    section = (ROOT / "benches/RESULTS.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    [_, _, *rows] = re.findall(r"(?m)(?:^\|.*\n)+", section)[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {
        row[0]: [float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*(?:\.\d+)?", row[column])] for row in cells
    }


def answers() -> str:
    """Answers of real engines that were compared with vLLM's; none differed."""
    found = recorded("Real engines under random requests, for an hour", 2).values()
    assert all(different == 0 for _, different in found)
    return f"{sum(compared for compared, _ in found):,.0f}"


def killed(column: int) -> float:
    """The sum of a column of the kills' second table."""
    section = (ROOT / "benches/RESULTS.md").read_text(encoding="utf-8").split("\n## Processes killed under load")[1]
    rows = re.findall(r"(?m)(?:^\|.*\n)+", section)[1].splitlines()[2:]
    return sum(float(row.strip("|").split("|")[column].replace(",", "")) for row in rows)


def first_token(place: int) -> str:
    """Milliseconds to the first token of 2,048 tokens: computed, from host memory, from disk."""
    found = recorded("Time to the first token, computed and loaded", 1)["2048"][place]
    return f"{float(f'{found:.2g}'):g}"


# The sentence, with braces for its number, and where the number comes from.
NUMBERS: list[tuple[str, str, Callable[[], object]]] = [
    ("docs/internals/disk.md", "one part in {} is for records", lambda: constant("META_SHARE")),
    ("docs/disk-format.md", "one part in {} is left", lambda: constant("META_SHARE")),
    ("docs/disk-format.md", "Version {}. All numbers", lambda: constant("FORMAT_VERSION")),
    ("docs/disk-format.md", "Record: {} bytes", lambda: constant("RECORD_BYTES")),
    ("docs/disk-format.md", "{} to a block of 4096 bytes", lambda: constant("RECORDS_PER_BLOCK")),
    ("docs/disk-format.md", "to a block of {} bytes", lambda: constant("BLOCK_BYTES", "contract/src/format")),
    ("docs/disk-format.md", "Namespace table: {} entries", lambda: constant("NAMESPACES_MAX", "contract/src/format")),
    ("docs/disk-format.md", "entries of {} KiB", lambda: constant("NAMESPACE_BYTES") >> 10),
    ("docs/disk-format.md", "at most one placeholder record for {}", lambda: WORDS[constant("PLACEHOLDERS_SHARE")]),
    ("docs/disk-format.md", "A data file has at most {} TiB less", lambda: (constant("CAPACITY_MAX") >> 40) + 1),
    ("docs/disk-format.md", "reflected polynomial {}", lambda: hex(constant("POLYNOMIAL"))),
    ("docs/internals/failures.md", "more than {} requests of one client", lambda: f"{constant('REQUESTS_MAX'):,}"),
    ("docs/internals/disk.md", "or {} seconds have passed", lambda: WORDS[constant("REFUSED_NS") // SECOND]),
    ("docs/internals/lookups.md", "starts at most {} promotions", lambda: WORDS[constant("PROMOTIONS_MAX")]),
    ("docs/internals/lookups.md", "the limit is {} seconds", lambda: WORDS[constant("NO_POLL_STALLS")]),
    ("docs/internals/disk.md", "takes none for {} at a time", lambda: WORDS[constant("WRITE_PAUSE_NS") // SECOND]),
    (
        "docs/internals/lookups.md",
        "gives up a lookup after {}",
        lambda: WORDS[python_constant("LOOKUP_DEADLINE_S")],
    ),
    ("docs/internals/server.md", "awake, yielding, for {} ms", lambda: constant("LINGER") / MS),
    ("docs/internals/server.md", "A miss older than {} ms", lambda: constant("MISS_FRESH") // MS),
    ("docs/internals/server.md", "for a disk lookup, {} ms)", lambda: constant("PENDING_DEADLINE") // MS),
    ("docs/server.md", "{} ms for a disk lookup", lambda: constant("PENDING_DEADLINE") // MS),
    ("docs/server.md", "`server_timeout_ms` ({})", lambda: option("server_timeout_ms")),
    ("docs/hybrid-models.md", "tokens (default {};", lambda: option("state_interval_tokens")),
    ("docs/gpu.md", "pages under {} KiB", lambda: api.GATHER_BELOW >> 10),
    ("docs/gpu.md", "under {} KiB in memory that is not pinned", lambda: cuda.UNPINNED_GATHER_BELOW >> 10),
    ("docs/gpu.md", "a block of {} threads", lambda: constant("THREADS", "copy/staged")),
    ("docs/gpu.md", "at multiples of {} bytes", lambda: constant("UNIT", "copy/staged")),
    ("docs/gpu.md", "room for {} pages", lambda: constant("MOST_PAGES", "copy/staged")),
    (
        "docs/gpu.md",
        "pages and {} blocks",
        lambda: constant("TABLE", "copy/staged") - constant("PAGE_ENTRIES") * constant("MOST_PAGES", "copy/staged"),
    ),
    ("docs/gpu.md", "for at most {} copies at once", lambda: constant("BATCH", "copy/batches")),
    ("docs/gpu.md", "with at most {} copies of a lane in flight", lambda: constant("IN_FLIGHT", "copy/batches")),
    (
        "docs/gpu.md",
        "({} or newer), otherwise",
        lambda: f"{memcpy._INTERFACE // 1000}.{memcpy._INTERFACE % 1000 // 10}",
    ),
    ("docs/gpu.md", "a staging buffer of {} MiB for each direction", lambda: lane.STAGING_BYTES >> 20),
    ("docs/gpu.md", "{} MiB for memory that is not pinned", lambda: lane.UNPINNED_STAGING_BYTES >> 20),
    ("docs/gpu.md", "not pinned, {} MiB in all", lambda: lane_bytes() >> 20),
    ("docs/gpu.md", "buffers of the lanes (up to {} MiB", lambda: lane_bytes() >> 20),
    ("docs/gpu.md", "| {} MiB at a time, more above", lambda: pinning.PIN_CHUNK >> 20),
    ("docs/gpu.md", "more above {} GiB", lambda: pinning.PIN_CHUNK * pinning.MAX_CHUNKS >> 30),
    ("docs/gpu.md", "at most {} registrations for each worker", lambda: f"{pinning.MAX_CHUNKS:,}"),
    ("docs/gpu.md", "the check ends after {} seconds", lambda: f"{gpu_check_seconds():g}"),
    ("benches/RESULTS.md", "plain copy of pinned memory | at least {}", lambda: speed.SHARE),
    ("benches/RESULTS.md", "over one | at least {}", lambda: speed.BOTH),
    ("benches/RESULTS.md", "by loads of whole blocks | at most {} %", lambda: f"{interference.SLOWDOWN_PERCENT:g}"),
    ("benches/RESULTS.md", "of memory that is not | at most {} ms", lambda: f"{interference.STALL_MS:g}"),
    ("README.md", "None of {} answers of real engines", answers),
    ("docs/results.md", "none of {} answers of real engines", answers),
    ("docs/results.md", "none of {} million blocks", lambda: f"{killed(2) / 1e6:.1f}"),
    ("docs/results.md", "compared after {} kills and stops", lambda: f"{killed(1):,.0f}"),
    ("docs/results.md", "a tiny model: {} ms from disk", lambda: first_token(2)),
    ("docs/results.md", "ms from disk, {} ms from host memory", lambda: first_token(1)),
    ("docs/results.md", "ms from host memory, {} ms computed", lambda: first_token(0)),
    ("benches/RESULTS.md", "time for a step of {} jobs", lambda: speed.JOBS),
    ("benches/RESULTS.md", "jobs | at most {} us", lambda: f"{speed.SUBMIT_US:g}"),
]


def text(document: str) -> str:
    return " ".join((ROOT / document).read_text(encoding="utf-8").split())


def stated(document: str, sentence: str) -> str:
    """The number that a document has in place of the braces."""
    before, after = sentence.split("{}")
    found = re.findall(re.escape(before) + r"(half a minute|a minute|[\w.,]+)" + re.escape(after), text(document))
    assert len(set(found)) == 1, f'{document} has no longer "{sentence}": change this file with it'
    return found[0].rstrip(".,") if not after else found[0]


@pytest.mark.parametrize(("document", "sentence", "value"), NUMBERS, ids=[one[1] for one in NUMBERS])
def test_stated_numbers(document: str, sentence: str, value: Callable[[], object]) -> None:
    assert stated(document, sentence) == str(value()), f"{document}: {sentence}"


def test_a_wrong_number_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "text", lambda document: "of which one part in 64 is for records, and more")
    with pytest.raises(AssertionError):
        test_stated_numbers(*NUMBERS[0])


def unsafe_files() -> set[str]:
    """Files of production code that allow themselves `unsafe`."""
    allowed = re.compile(r"(?:expect|allow)\(\s*unsafe_code")
    paths = (path for path in PRODUCTION if allowed.search(path.read_text(encoding="utf-8")))
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_unsafe_is_where_contributing_says() -> None:
    [bullet] = re.findall(r"- `unsafe` only in (.*?) - ", text("CONTRIBUTING.md"))
    assert set(re.findall(r"`([\w./]+\.rs)`", bullet)) == unsafe_files() != set()
