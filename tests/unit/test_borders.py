"""The table of borders in the document on security names tests that exist, and fields that the code reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from undercroft import request_params
from undercroft.connector.requests.client_fields import WORDS
from undercroft.option_values import CLIENT_FIELDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/security.md").read_text(encoding="utf-8")
HEADER = "| who | may | may not | enforced by | tested by |"
WHO = (
    "another Unix user", "a process of the same user", "a client of vLLM's HTTP API", "a tenant", "a remote store",
    "an attacker on the network", "a neighbour on the server", "whoever reads a core dump", "root",
)  # fmt: skip


def rows(header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    _, _, rest = DOCUMENT.partition(f"{header}\n")
    assert rest, f"no table begins with {header}"
    lines = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def defined() -> set[str]:
    """The names of all tests, in Python and in Rust."""
    found: set[str] = set()
    for pattern, folder, marks in (("*.py", "tests", r"def"), ("*.rs", "rust", r"fn")):
        for path in (ROOT / folder).rglob(pattern):
            text = path.read_text(encoding="utf-8")
            if folder == "tests" and not path.name.startswith("test_"):
                continue
            if folder == "rust" and "#[test]" not in text and "tests" not in path.parts:
                continue
            found |= set(re.findall(rf"^\s*(?:async )?{marks} (\w+)\(", text, re.MULTILINE))
    return found


TABLE = rows(HEADER)


def test_every_border_is_drawn() -> None:
    for who in WHO:
        assert any(row[0].startswith(who) for row in TABLE), who
    assert all(len(row) == 5 and all(row) for row in TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0].split(",")[0].split(":")[0])
def test_the_tests_of_a_border_exist(row: list[str]) -> None:
    names = re.findall(r"`(\w+)`", row[4])
    assert names and row[4] == ", ".join(f"`{name}`" for name in names)
    missing = set(names) - defined()
    assert not missing, f"no test has these names: {missing}"


def test_the_option_and_the_fields_of_a_gateway_are_those_of_the_code() -> None:
    words = [row[0].strip("`") for row in rows("| word | allows | tells or gives a client |")]
    assert tuple(words) == CLIENT_FIELDS
    gateway = "\n".join(row[0] for row in rows("| field | on which endpoint | do |"))
    for name in ("kv_transfer_params", "cache_hit_threshold", "vllm_xargs", "extra_args", "cache_salt", "request_id"):
        assert f"`{name}`" in gateway or name in gateway
    # All others of undercroft's fields are inside of kv_transfer_params.
    assert set(WORDS) <= set(request_params.KNOWN)
