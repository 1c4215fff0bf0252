"""Values of vLLM's configurations as JSON, the same in every process."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any


def plain(value: Any) -> Any:
    """``value`` in types that JSON has. Raises TypeError for an object whose content cannot be read."""
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, (float, Fraction)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(inner), sort_keys=True) for inner in value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    text = str(value)
    if " at 0x" in text:
        raise TypeError(f"a {type(value).__name__} cannot be part of the cache's namespace: {text}")
    return text
