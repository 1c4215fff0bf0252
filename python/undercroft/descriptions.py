"""Shows descriptions of namespaces, and the differences between two, to people. See docs/identity.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from undercroft.identity.releases import FORMAT, RELEASES, Schemes

_NUMBER = re.compile(r"\[\d+\]")
"""A place in a list, which differences do not show."""
_SHOWN_MAX = 60
"""Most characters of a value that a difference shows."""
_FILES_MAX = 3
"""Most files that a difference of weights names."""


def parsed(text: str) -> dict[str, Any]:
    """A description as an object; empty if the text is no description."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def summary(description: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """The columns of `undercroft inspect`: model, dtype, tensor parallel size, tokens of a block, vLLM."""
    model = description.get("model")
    model = model if isinstance(model, dict) else {"id": model}
    architectures, names = model.get("architectures"), model.get("names")
    architecture = ", ".join(map(str, architectures)) if isinstance(architectures, list) else "?"
    named = names[0] if isinstance(names, list) and names else None
    known = model.get("id") or named or str(model.get("weights", "?"))[:8]
    dtype = str(model.get("dtype", "?")).removeprefix("torch.")
    cache_dtype = description.get("cache_dtype", "auto")
    hashing, parallel = (
        value if isinstance(value := description.get(key), dict) else {} for key in ("hash", "parallel")
    )
    pages = description.get("pages", "?")
    return (
        f"{architecture} {known}",
        dtype if cache_dtype == "auto" else f"{dtype}, KV {cache_dtype}",
        str(parallel.get("tensor", "?")),
        str(hashing.get("block_tokens", "?")),
        f"hashes {hashing.get('scheme', '?')}, pages {str(pages).removeprefix('vllm ')}",
    )


def found_now(description: dict[str, Any], release: str | None, weights: frozenset[str] | None) -> str:
    """Whether a vLLM of ``release`` with equal settings finds a namespace: "yes", "no: why", or "?".

    ``weights``: sampled digests of a model's weights, one of which must match; None to compare no model.
    """
    hashing = _object(description.get("hash"))
    if not hashing or release is None:
        return "?"
    here = RELEASES.get(release, Schemes(f"vllm {release}", f"vllm {release}"))
    if description.get("format", FORMAT) != FORMAT:
        return "no: format"
    if hashing.get("scheme") != here.block_hash:
        return "no: block hashes"
    if description.get("pages") not in (here.page, f"vllm {release}"):
        return "no: pages"
    theirs = _of_model(description, "weights")
    if weights is None or theirs in weights:
        return "yes"
    # There is no sampled digest to compare if the weights have a model_id, a name only, or a full digest.
    return "no: weights" if isinstance(theirs, str) and ":" not in theirs else "?"


FilesOf = Callable[[str, str], list[str]]
"""Names of the files in which two models differ, given the digests of their weights; empty if they are unknown."""


def _unknown(_one: str, _other: str) -> list[str]:
    return []


def differences(theirs: dict[str, Any], ours: dict[str, Any], files_of: FilesOf = _unknown) -> list[str]:
    """One text for each field in which two descriptions differ, with both values.

    The text about weights names the differing files that ``files_of`` returns.
    """
    left, right = _flat(theirs), _flat(ours)
    texts = []
    for path in sorted(left.keys() | right.keys()):
        one, other = left.get(path), right.get(path)
        if one == other:
            continue
        name = _NUMBER.sub("", path)
        if name in ("model.weights", "draft.model.weights"):
            files = files_of(str(one), str(other))
            texts.append(f"{name} differs ({_few(files)})" if files else f"{name} differs")
        elif name in ("model.config", "hash.seed", "hash.serialized"):
            texts.append(f"{name} differs")
        else:
            texts.append(f"{name} {_short(one)}, here {_short(other)}")
    # Groups often differ in the same way.
    return list(dict.fromkeys(texts))


def why_not_reused(ours: str, held: Iterable[str], files_of: FilesOf = _unknown) -> str | None:
    """The reason why a directory with blocks of a model has no hits for it: the differences to the nearest description.

    A description of the same model has the same weights or the same configuration. None if the directory holds no
    such description, or holds ``ours``.
    """
    mine = parsed(ours)
    nearest: list[str] | None = None
    for text in held:
        if text == ours:
            return None
        other = parsed(text)
        same = (name for name in ("weights", "id", "config") if _of_model(mine, name))
        if not any(_of_model(mine, name) == _of_model(other, name) for name in same):
            continue
        found = differences(other, mine, files_of)
        if nearest is None or len(found) < len(nearest):
            nearest = found
    return "; ".join(nearest) if nearest else None


def _few(names: list[str]) -> str:
    more = len(names) - _FILES_MAX
    return ", ".join(names[:_FILES_MAX]) + (f" and {more} more" if more > 0 else "")


def _of_model(description: dict[str, Any], name: str) -> Any:
    model = description.get("model")
    return model.get(name) if isinstance(model, dict) else None


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values in objects and in lists of objects or lists, by their paths: `a.b`, or `a[1].b` in a list."""
    if isinstance(value, dict):
        parts = {f"{name}.{key}" if name else key: inner for key, inner in value.items()}
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        parts = {f"{name}[{index}]": inner for index, inner in enumerate(value)}
    else:
        return {name: value}
    return {path: end for part, inner in parts.items() for path, end in _flat(inner, part).items()}


def _short(value: Any) -> str:
    text = "not set" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."
