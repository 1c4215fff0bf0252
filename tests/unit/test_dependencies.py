"""Packages that `tools/dependencies.py` allows and refuses."""

from __future__ import annotations

from typing import Any

import pytest
from dependencies import REGISTRY, licensed, problems

POLICY = {"licenses": {"allow": ["MIT", "Zlib"]}, "bans": {"skip": [{"crate": "syn@1.0.0", "reason": "old"}]}}


def crate(name: str, version: str = "2.0.0", license: str | None = "MIT", source: str | None = REGISTRY) -> Any:
    return {"name": name, "version": version, "license": license, "source": source}


FINE = [crate("syn"), crate("syn", "1.0.0"), crate("ours", source=None)]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("GPL-3.0", False),
        ("GPL-3.0 OR MIT", True),
        ("MIT AND GPL-3.0", False),
        ("(MIT OR GPL-3.0) AND Zlib", True),
        ("MIT AND (GPL-3.0 OR BSD-2-Clause)", False),
        ("MIT/Apache-2.0", True),
        ("MIT WITH GPL-exception", False),
        ("(MIT", False),
        ("MIT) OR MIT", False),
        ("", False),
    ],
)
def test_license_expressions(expression: str, expected: bool) -> None:
    assert licensed(expression, ["MIT", "Zlib"]) is expected


def test_allowed_packages_are_no_problem() -> None:
    assert problems(FINE, POLICY) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (crate("new", license="GPL-3.0"), "new 2.0.0: license GPL-3.0 is not in licenses.allow"),
        (crate("new", license=None), "license none"),
        (crate("new", source="git+https://example.org/new"), "comes from git"),
        (crate("new", source="registry+https://example.org/index"), "comes from registry"),
        (crate("syn", "3.0.0"), "syn: versions 1.0.0, 2.0.0, 3.0.0; keep one"),
    ],
)
def test_anything_else_is(bad: Any, message: str) -> None:
    [found] = problems([*FINE, bad], POLICY)
    assert message in found


def test_an_exception_that_nothing_needs_is_a_problem() -> None:
    assert problems(FINE[:1], POLICY) == ["syn@1.0.0: in bans.skip, but there is no second version of it"]
