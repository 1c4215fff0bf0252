"""Amounts of memory, disk, bandwidth and time as people write them: "16GiB", "1.5 TB", "25%", "3d"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*|%)\s*", re.ASCII)
SIZE_FORMAT = "bytes as a number, or with a unit (KiB, MiB, GiB, TiB, KB, MB, GB, TB)"
"""The forms that `parse_size` accepts, for messages."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Either a number of bytes, or a share (0 to 1) of a total that depends on the machine."""

    size: int | None = None
    share: float | None = None

    def of(self, total: int) -> int:
        """The amount in bytes. A share is a share of ``total`` bytes."""
        if self.size is not None:
            return self.size
        return int(total * (self.share or 0.0))

    def __str__(self) -> str:
        return format_size(self.size) if self.size is not None else f"{100 * (self.share or 0.0):g}%"


def parse_size(value: object) -> int:
    """The bytes in ``value``, a whole number or text with an optional unit. Raises ValueError with the reason."""
    amount = parse_amount(value)
    if amount.size is None:
        raise ValueError("a percentage is not possible here")
    return amount.size


def parse_amount(value: object) -> Amount:
    """A size, or a share written as a percentage above 0 and up to 100. Raises ValueError with the reason."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{type(value).__name__} is not a size")
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or value != int(value):
            raise ValueError("not a whole number of bytes")
        if value < 0:
            raise ValueError("negative")
        return Amount(size=int(value))
    match = _AMOUNT.fullmatch(value)
    if match is None:
        raise ValueError("not a size")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError("a percentage must be above 0 and at most 100")
        return Amount(share=number / 100)
    if unit.upper() not in _UNITS:
        raise ValueError(f"unknown unit {unit!r}")
    return Amount(size=round(number * _UNITS[unit.upper()]))


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DURATION_FORMAT = "seconds as a number, or with a unit (s, m, h, d)"
"""The forms that `parse_duration` accepts, for messages."""


def parse_duration(value: object) -> int:
    """The seconds in ``value``, a whole number or text such as "3d". Raises ValueError with the reason."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{type(value).__name__} is not a duration")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+)\s*([smhd]?)\s*", value, re.ASCII)
        if match is None:
            raise ValueError("not a duration")
        return int(match[1]) * _SECONDS[match[2] or "s"]
    if not math.isfinite(value) or value != int(value):
        raise ValueError("not a whole number of seconds")
    if value < 0:
        raise ValueError("negative")
    return int(value)


def format_size(size: float) -> str:
    """A number of bytes for people: in binary units, with four significant digits."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            value = size / scale
            return f"{value:.4g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    return f"{size:.0f} B"
