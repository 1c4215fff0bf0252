"""The counts of `tools/structure.py`."""

from __future__ import annotations

import functools
import json
from typing import Any

import structure

RUST = """
//! match Backend::Served => comment
/// A struct.
pub struct Wide<'a, F: Fn(u8) -> u8> {
    pub(crate) one: Vec<(u8, u16)>,
    two: &'a str, // three: u8
    inner: std::collections::HashMap<u8, Inner>,
    f: F,
}
struct Tuple(u8);

fn long(x: u8) -> u8 {
    let s = "fn not_one() { }";
    match self.backend {
        Backend::Embedded { shell } => 1,
        Backend::Served(_) => 2,
    }
}
trait Verb { fn declared(&self); }
fn convert(x: usize) {
    u32::try_from(x.min(f(1)))
        .unwrap_or(u32::MAX);
    u8::try_from(x).expect("fits");
    assert_eq!(x, 1);
    debug_assert!(x == 1);
}
#[cfg(test)]
mod tests {
    fn a_test() { assert!(true); }
}
"""
CODE = structure.rust_code(structure.without_tests(RUST))


@functools.cache
def this_checkout() -> dict[str, Any]:
    return structure.measure(structure.HERE)


def test_structs_and_functions() -> None:
    assert list(structure.structs(CODE)) == [("Wide", 4)]
    assert list(structure.functions(CODE)) == [("long", 7), ("convert", 7)]


def test_modes_and_conversions() -> None:
    assert structure.mode_matches(CODE) == 1
    assert structure.saturated(CODE) == 1


def test_python_functions_count_their_lines() -> None:
    assert list(structure.python_functions("def f():\n    a = 1\n\n    return a\n")) == [("f", 4)]


def test_python_classes_count_fields_that_they_declare_and_assign_on_themselves() -> None:
    text = """
class Outer:
    declared: int = 0
    CONSTANT = 1

    class Inner:
        inner: int

    def __init__(self, other):
        self.first, (self.second, other.not_one) = 1, (2, 3)
        self.declared += 1
        local: int = self.second

    @property
    def value(self):
        return self.first
"""
    assert list(structure.python_classes(text)) == [("Outer", 3), ("Inner", 1)]


def test_circles() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert structure.circles(graph) == [["a", "b", "c"]]


def test_paths_in_braces_are_taken_apart() -> None:
    code = "use crate::{a::b, c::{self, d::E}, f}; use super::g::H; crate::x::y();"
    assert sorted(structure._rust_paths(code)) == [
        ("crate", "a", "b"),
        ("crate", "c"),
        ("crate", "c", "d", "E"),
        ("crate", "f"),
        ("crate", "x", "y"),
        ("super", "g", "H"),
    ]


def test_no_count_has_grown() -> None:
    """After counts have fallen, ``python tools/structure.py --ratchet`` writes them down."""
    limits = json.loads(structure.RATCHET_FILE.read_text(encoding="utf-8"))
    assert list(limits) == list(structure.RATCHET)
    numbers = this_checkout()
    assert not structure.grown(numbers, limits)


def test_a_count_above_its_limit_is_named_with_its_parts() -> None:
    numbers = {"names": ["Held 3", "Job 2"], "worst": {"count": 80, "name": "run", "file": "a.rs"}, "plain": 4}
    limits = {"names": 1, "worst": 79, "plain": 4}
    assert structure.grown(numbers, limits) == [
        "names: 2  (Held 3, Job 2), but at most 1",
        "worst: 80  (run in a.rs), but at most 79",
    ]
    assert structure.grown(numbers, {"names": 2, "worst": 80, "plain": 5}) == []


def test_this_checkout_can_be_counted() -> None:
    numbers = this_checkout()
    assert all(numbers[name]["count"] > 5 for name in numbers if "widest" in name or "longest" in name)
    assert numbers["binding lines"] > 0
    assert all(structure.text(value) for value in numbers.values())
