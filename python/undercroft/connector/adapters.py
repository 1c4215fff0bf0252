"""Keys for the weights of LoRA adapters: vLLM's block hashes hold only names and paths, which other weights may get.

vLLM's own cache ends with the process, so names are enough for it. Ours survives restarts and is shared.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from pathlib import Path
from typing import Any

from undercroft.connector.weights import SAMPLED, Digests, weights_digest

_CONFIG = "adapter_config.json"
_LOOK_AGAIN_S = 1.0
"""Seconds for which a key is used. Requests come by the thousand, and the files may lie on a slow network."""


class Adapters:
    """A key for the weights of each adapter, which goes into the hashes of its requests' blocks.

    The key is the same in every process that has the same files there. Where an adapter's files cannot be seen, or
    have changed since this process saw them first, the weights that a worker has loaded are unknown: this process
    shares such a key with no other.
    """

    def __init__(self) -> None:
        self.weights = SAMPLED
        """How weights are known: the option of this name."""
        self._digests = Digests()
        self._seen: dict[tuple[str, str], str] = {}
        self._private: dict[tuple[str, str, str], str] = {}
        self._recent: dict[tuple[str, str], tuple[float, str]] = {}
        """The last key of each adapter, and until when requests take it without a look at the files."""

    def look_again(self) -> None:
        """Look at the files with the next request: a new engine in this process reads them anew."""
        self._recent.clear()

    def of_request(self, request: Any) -> str:
        """The key of a request's adapter, to be asked for once: the files may change while the request runs.

        Looks at the files at most once a second for each adapter.
        """
        adapter = request.lora_request
        until, recent = self._recent.get((adapter.lora_name, adapter.lora_path), (0.0, ""))
        return recent if time.monotonic() < until else self.key(adapter)

    def key(self, adapter: Any) -> str:
        """The key of a `LoRARequest`, from its files as they are now. Call it before the weights are loaded."""
        named = (adapter.lora_name, adapter.lora_path)
        found = self._key(named)
        # From the end of the look, which a slow file system can make long.
        self._recent[named] = (time.monotonic() + _LOOK_AGAIN_S, found)
        return found

    def _key(self, named: tuple[str, str]) -> str:
        try:
            found = self._fingerprint(named[1])
        except Exception:  # called where vLLM takes requests in: an adapter must not end the engine
            found = ""
        if found and self._seen.setdefault(named, found) == found:
            return found
        if found:
            # The key stays private, even if the old files come back: a worker may have loaded these meanwhile.
            self._seen[named] = ""
        return self._private.setdefault((*named, found), secrets.token_hex(16))

    def _fingerprint(self, path: str) -> str:
        directory = _directory(path)
        digest = weights_digest(directory, self._digests, self.weights) if directory else ""
        if directory is None or not digest:
            return ""
        config = (directory / _CONFIG).read_bytes()
        return hashlib.sha256(json.dumps([digest, hashlib.sha256(config).hexdigest()]).encode()).hexdigest()


def _directory(path: str) -> Path | None:
    """Where vLLM finds the adapter (`vllm/lora/utils.py`), if it is on this machine."""
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
