"""Checks of ``undercroft doctor`` that compare measurements of the tiers and of the model in running engines."""

from __future__ import annotations

from collections.abc import Iterator

from undercroft.cli import engines, planning
from undercroft.cli.doctor.check import Check

_REMEDY = {
    "disk": "This disk is slower than the model computes: use a faster one, or several.",
    "remote store": "This store is slower than the model computes: use a faster store or network.",
}


def checks() -> Iterator[Check]:
    """For each engine of this user that has measured a tier and its model: the least length of prompts it reads."""
    for engine in engines.all_of_user():
        tiers = planning.of_tiers(engine["stats"])
        name = f"plan of the engine in process {engine['pid']}"
        if not tiers and engine["info"].get("disks"):
            yield Check(name, "ok", "no plan yet: the engine has not read and computed enough")
        for tier, sentence, stats in tiers:
            computed = not planning.loaded_lengths(stats)
            remedy = _REMEDY[tier] if computed else ""
            yield Check(name, "warn" if computed else "ok", sentence, remedy, planning.table(stats))
