"""Checks of ``undercroft doctor`` that compare the disks with the model, as running engines have measured both."""

from __future__ import annotations

from collections.abc import Iterator

from undercroft.cli import engines, planning
from undercroft.cli.doctor.check import Check


def checks() -> Iterator[Check]:
    """For each engine of this user that has measured its disk and its model, from which length on it reads prompts."""
    for engine in engines.all_of_user():
        if not engine["info"].get("disks"):
            continue
        stats = engine["stats"]
        name = f"plan of {engine['pid']}"
        if not planning.is_known(stats):
            yield Check(name, "ok", "no plan yet: it has not read and computed enough")
            continue
        computed = not planning.loaded_lengths(stats)
        yield Check(
            name,
            "warn" if computed else "ok",
            planning.sentence(stats),
            "This disk is slower than the model computes: use a faster one, or several." if computed else "",
            planning.table(stats),
        )
