"""The result of one check of ``undercroft doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``warn`` costs speed or a feature; ``fail`` keeps undercroft from working."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    plan: list[tuple[str, ...]] | None = None
    """Rows of `planning.HEADER`."""
