"""Hints of a request about its prompt's future use: their form, in ``kv_transfer_params`` and as vLLM's ``kv_hints``.

This module uses no engine. The frontend checks hints with it, and the scheduler's half carries the hints out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from undercroft.option_values import did_you_mean, nearest

NAME = "kv_hints"
"""Key of the hints in ``kv_transfer_params``, and vLLM's field of a request."""
COMPUTE = "compute"
"""Key beside the hints: false for a request with hints and nothing to compute."""
DEFAULT_TTL_S = 300.0
TTL_MAX_S = 86_400.0
PIN_NAME_MAX = 64
VERBS = {"prefetch": "prefetch", "pin": "pin", "retain": "pin", "demote": "demote", "release": "release"}
"""Verbs that a hint may have, and the engine's verb for each."""
VERSIONS = frozenset({"1", "1.0"})
"""Versions of vLLM's typed actions that this module understands."""
_ORDER = ("prefetch", "pin", "demote", "release")
_FIELDS = {
    "prefetch": {"tokens", "hashes"},
    "pin": {"tokens", "hashes", "ttl_s", "id"},
    "demote": {"tokens", "hashes"},
    "release": {"tokens", "hashes", "id"},
}
UNKNOWN_MAX = 16
"""Most hints of unknown kinds that are answered."""
HASHES_MAX = 1 << 16
HASHES_ALLOWED = f"a list of up to {HASHES_MAX} block hashes, each of 1 to 32 bytes in hexadecimal"


class InvalidHintError(ValueError):
    """A hint that cannot be used. The message names the hint, its value and the allowed values."""

    def __init__(self, where: str, value: Any, allowed: str) -> None:
        super().__init__(f"{where} = {value!r}: allowed is {allowed}.")
        self.name = where


@dataclass(frozen=True, slots=True)
class Hint:
    """One hint."""

    verb: str
    key: str
    """Key of the answer: the verb in the client's spelling, or the id of vLLM's action."""
    tokens: int | None = None
    """The hint concerns only this number of first tokens; None: all tokens."""
    ttl_s: float = DEFAULT_TTL_S
    name: str = ""
    """Name of a pin."""
    hashes: tuple[bytes, ...] | None = None
    """The hint concerns the chain of these blocks; None: the request's own chain."""


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one request, in the order in which they are carried out."""

    hints: tuple[Hint, ...] = ()
    computes: bool = True
    """Whether the request is computed: false for a request with hints alone."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Hints of unknown kinds, which are not carried out: the key of the answer, and the nearest verb or ""."""


NONE = Hints()


def of_request(kv_transfer_params: Any, kv_hints: Any = None) -> Hints:
    """The hints of a request, from its parameters and from vLLM's typed hints. Raises InvalidHintError."""
    given = kv_transfer_params.get(NAME) if isinstance(kv_transfer_params, Mapping) else None
    if given is None and kv_hints is None:
        return NONE
    found: list[Hint] = []
    computes = True
    unknown: dict[str, str] = {}
    for key, value, where, is_known in _each(given, kv_hints):
        if not is_known:
            verb, _, action_id = key.partition(":")
            if len(unknown) < UNKNOWN_MAX:
                unknown[(action_id or key)[:PIN_NAME_MAX]] = nearest(verb[:PIN_NAME_MAX], (*VERBS, COMPUTE))
            continue
        if key == COMPUTE:
            computes = _checked(value, where, lambda one: isinstance(one, bool), "true or false")
            continue
        hint, also_computes = _parse(key, value, where)
        computes &= also_computes
        found.append(hint)
    found.sort(key=lambda hint: _ORDER.index(hint.verb))
    return Hints(tuple(found), computes, unknown)


def _each(given: Any, kv_hints: Any) -> Iterable[tuple[str, Any, str, bool]]:
    """For each hint: verb (with the key of its answer after a colon), value, place, and whether the verb is known."""
    if given is not None:
        where = f"kv_transfer_params.{NAME}"
        _checked(given, where, lambda one: isinstance(one, Mapping), f"an object with {_words(VERBS)} or {COMPUTE}")
        for key, value in given.items():
            yield str(key), value, f"{where}.{key}", key in VERBS or key == COMPUTE
    for action in getattr(kv_hints, "actions", None) or ():
        verb = str(action.action_type).removeprefix("kv.")
        is_known = verb in VERBS and str(action.action_version) in VERSIONS
        yield f"{verb}:{action.action_id}", action.payload, f"{NAME}.{verb}", is_known


def _parse(key: str, value: Any, where: str) -> tuple[Hint, bool]:
    written, _, action_id = key.partition(":")
    verb = VERBS[written]
    fields = _FIELDS[verb] | ({COMPUTE} if action_id else set())
    if value is True:
        value = {}
    allowed = f"true, or an object with {_words(sorted(fields))}"
    if isinstance(value, Mapping):
        hints = (did_you_mean(str(one)[:PIN_NAME_MAX], sorted(fields)) for one in value if one not in fields)
        allowed += next(filter(None, hints), "")
    _checked(value, where, lambda one: isinstance(one, Mapping) and set(one) <= fields, allowed)
    tokens = value.get("tokens")
    if tokens is not None:
        _checked(tokens, f"{where}.tokens", lambda one: _is_number(one, int) and one >= 1, "a whole number from 1 on")
    ttl_s = value.get("ttl_s", DEFAULT_TTL_S)
    in_range = f"a number of seconds from 1 to {TTL_MAX_S:g}"
    _checked(ttl_s, f"{where}.ttl_s", lambda one: _is_number(one, (int, float)) and 1 <= one <= TTL_MAX_S, in_range)
    name = value.get("id", "")
    is_name = f"text of 1 to {PIN_NAME_MAX} bytes"
    if "id" in value:
        _checked(name, f"{where}.id", lambda one: isinstance(one, str) and 0 < len(utf8(one)) <= PIN_NAME_MAX, is_name)
    computes = value.get(COMPUTE, True)
    _checked(computes, f"{where}.{COMPUTE}", lambda one: isinstance(one, bool), "true or false")
    hashes = None
    if "hashes" in value:
        hashes = parse_hashes(value["hashes"])
        _checked(value["hashes"], f"{where}.hashes", lambda _: hashes is not None, HASHES_ALLOWED)
    return Hint(verb, action_id or written, tokens, float(ttl_s), name, hashes), computes


def parse_hashes(given: Any) -> tuple[bytes, ...] | None:
    """The hashes in a list of texts; None if the value is no such list."""
    if not isinstance(given, (list, tuple)) or not 0 < len(given) <= HASHES_MAX:
        return None
    try:
        hashes = tuple(bytes.fromhex(one) for one in given)
    except (TypeError, ValueError):
        return None
    lengths = {len(one) for one in hashes}
    return hashes if len(lengths) == 1 and 0 < lengths.pop() <= 32 else None


def utf8(text: str) -> bytes:
    """A client's text as bytes, even if no text has this encoding."""
    return text.encode("utf-8", "surrogatepass")


def _is_number(value: Any, kinds: Any) -> bool:
    # In Python a boolean is an int. Here it is a mistake.
    return isinstance(value, kinds) and not isinstance(value, bool)


def _checked(value: Any, where: str, holds: Callable[[Any], bool], allowed: str) -> Any:
    if not holds(value):
        raise InvalidHintError(where, value, allowed)
    return value


def _words(names: Iterable[str]) -> str:
    return ", ".join(names)
