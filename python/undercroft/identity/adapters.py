"""Keys for the weights of LoRA adapters: vLLM's block hashes hold only the adapters' names and paths.

Other weights may get the same name and path. Names are enough for vLLM's own cache, which ends with the process.
undercroft's cache survives restarts and is shared.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from pathlib import Path
from typing import Any

from undercroft.identity.weights import SAMPLED, Digests, weights_digest

_CONFIG = "adapter_config.json"
_Named = tuple[str, str, bool]
"""An adapter's name, its path, and whether vLLM reads its experts' weights as tensors of three dimensions."""
_LOOK_AGAIN_S = 1.0
"""Seconds for which a key is used without a look at the files: these may lie on a slow network file system."""


class Adapters:
    """A key for the weights of each adapter. The key goes into the block hashes of the adapter's requests.

    The key is the same in every process that has the same files there. Where an adapter's files cannot be seen, or
    have changed since this process saw them first, the weights that a worker has loaded are unknown: this process
    shares the adapter's key with no other process.
    """

    def __init__(self) -> None:
        self.weights = SAMPLED
        """How weights are known: the option of this name."""
        self._digests = Digests()
        self._seen: dict[_Named, str] = {}
        self._private: dict[tuple[Any, ...], str] = {}
        self._recent: dict[_Named, tuple[float, str]] = {}
        """The last key of each adapter, and the time until which requests use it without a look at the files."""

    def look_again(self) -> None:
        """Look at the files again at the next request: a new engine in this process reads the adapters anew."""
        self._recent.clear()

    def of_request(self, request: Any) -> str:
        """The key of a request's adapter. Call this once per request: the files may change while the request runs.

        Looks at the files at most once a second for each adapter.
        """
        adapter = request.lora_request
        until, recent = self._recent.get(_named(adapter), (0.0, ""))
        return recent if time.monotonic() < until else self.key(adapter)

    def key(self, adapter: Any) -> str:
        """The key of a `LoRARequest`, from its files as they are now. Call it before the weights are loaded."""
        named = _named(adapter)
        found = self._key(named)
        # The second begins after the look at the files, which is slow on a slow file system.
        self._recent[named] = (time.monotonic() + _LOOK_AGAIN_S, found)
        return found

    def _key(self, named: _Named) -> str:
        try:
            found = self._fingerprint(named)
        except Exception:  # vLLM calls this for each new request: an error here must not end the engine
            found = ""
        if found and self._seen.setdefault(named, found) == found:
            return found
        if found:
            # The key stays private, even if the old files come back: a worker may have loaded the new files meanwhile.
            self._seen[named] = ""
        return self._private.setdefault((*named, found), secrets.token_hex(16))

    def _fingerprint(self, named: _Named) -> str:
        _, path, *reading = named
        directory = _directory(path)
        digest = weights_digest(directory, self._digests, self.weights) if directory else ""
        if directory is None or not digest:
            return ""
        config = (directory / _CONFIG).read_bytes()
        parts = [digest, hashlib.sha256(config).hexdigest(), *(reading if any(reading) else [])]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _named(adapter: Any) -> _Named:
    return adapter.lora_name, adapter.lora_path, bool(getattr(adapter, "is_3d_lora_weight", False))


def _directory(path: str) -> Path | None:
    """The directory where vLLM finds the adapter (`vllm/lora/utils.py`); None if it is not on this machine."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, _CONFIG)
    except Exception:  # not a repository's name, or another hub
        return None
    return Path(found).parent if isinstance(found, str) else None


ADAPTERS = Adapters()
"""The keys of this process."""
