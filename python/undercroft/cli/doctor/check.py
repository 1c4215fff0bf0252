"""The result of one check of ``undercroft doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """The finding of one check. A ``warn`` costs speed or a feature. With a ``fail`` undercroft does not work."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    plan: list[tuple[str, ...]] | None = None
    """Rows of `planning.HEADER`."""
