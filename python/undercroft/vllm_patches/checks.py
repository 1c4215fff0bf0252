"""Checks that vLLM's internals are the ones that a patch was written for."""

from __future__ import annotations

import inspect
from typing import Any


class UnknownInternalsError(Exception):
    """vLLM lacks a name that a patch uses, or the name has another form."""


def takes(owner: Any, name: str, *parameters: str) -> None:
    """Check that ``owner`` has a function ``name`` with these parameters."""
    function = getattr(owner, name, None)
    needs(function is not None, f"{owner.__name__} has no {name}")
    known = inspect.signature(function).parameters if function is not None else {}
    for parameter in parameters:
        needs(parameter in known, f"{owner.__name__}.{name} has no parameter {parameter}")


def sets(owner: Any, *attributes: str) -> None:
    """Check that the constructor of ``owner`` uses these attributes."""
    constructor: Any = inspect.unwrap(owner.__init__)
    for attribute in attributes:
        needs(attribute in constructor.__code__.co_names, f"{owner.__name__} sets no {attribute}")


def has(owner: Any, *fields: str) -> None:
    """Check that ``owner`` has these fields or attributes."""
    known = getattr(owner, "__struct_fields__", None) or getattr(owner, "__annotations__", {})
    for field in fields:
        needs(field in known or hasattr(owner, field), f"{owner.__name__} has no {field}")


def needs(condition: bool, otherwise: str) -> None:
    """Raise UnknownInternalsError with the message ``otherwise`` unless the condition holds."""
    if not condition:
        raise UnknownInternalsError(otherwise)
