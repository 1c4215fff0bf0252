"""Log lines at start about the cache's identity: why it is cold, weights known by name only, random block hashes."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from undercroft.descriptions import why_not_reused as _why_not_reused
from undercroft.errors import ConfigError, ServerError, StoreError
from undercroft.identity.namespace import known_by_name
from undercroft.log import logger
from undercroft.patience import LIMIT_S, within

if TYPE_CHECKING:
    from undercroft.config import UndercroftConfig
    from undercroft.identity.weights import Digests

_SERVER_TIMEOUT_S = 1.0
"""Seconds for which the start waits for a server's answer about its namespaces."""


def why_not_reused(description: str, config: UndercroftConfig, digests: Digests) -> str | None:
    """The differences between this description and that of the same model's cache on disk, if the cache is not reused.
    Call this before the description is registered: registration writes the description to the directory."""
    from undercroft import _core

    held: list[str] = []
    for path in _directories(config):
        # The directory is new, cannot be read, or hangs. The engine reports such an error.
        with contextlib.suppress(StoreError, TimeoutError):
            held += within(LIMIT_S, path, partial(_core.descriptions, path))
    return _why_not_reused(description, held, digests.differing_files)


def _directories(config: UndercroftConfig) -> list[str]:
    """The directories of this process's engine or of the server's engine: both run on this host, as this user."""
    if not config.server:
        return list(config.disk_path)
    from undercroft import _core

    # vLLM starts although a server has not started yet or answers late.
    with contextlib.suppress(ServerError):
        status = _core.server_status(config.server.removeprefix("unix://"), _SERVER_TIMEOUT_S)
        return [str(disk["path"]) for disk in status["info"].get("disks", ())]
    return []


def warn_of_names(description: str) -> None:
    """Warn of weights that only a name identifies."""
    for name in known_by_name(description):
        logger.warning(
            "undercroft: the weights of %s lie where undercroft cannot read them, and no commit is known. Other "
            "weights under this name would find this cache: change namespace_salt or model_id with the weights "
            "(docs/identity.md).",
            name,
        )


def check_seed(reason: str, config: UndercroftConfig, *, is_shared: bool) -> None:
    """Warn of block hashes with a random seed; refuse them in a tier that other processes use."""
    advice = "Set PYTHONHASHSEED to the same value everywhere, or use --prefix-caching-hash-algo sha256 or sha256_cbor."
    if config.remote:
        raise ConfigError(
            f"undercroft: remote = {config.remote!r} with random block hashes: {reason}; no other host would find the "
            f"blocks. {advice}"
        )
    if is_shared:
        where = f"server = {config.server!r}" if config.server else f"disk_path = {list(config.disk_path)}, in use,"
        raise ConfigError(
            f"undercroft: {where} with random block hashes: {reason}; no other process would ever hit these blocks. "
            f"{advice}"
        )
    kept = f" Blocks that it saves in {', '.join(config.disk_path)} are never found again." if config.disk_path else ""
    logger.warning("undercroft: %s.%s %s", reason, kept, advice)
