"""Registers the connector's name with vLLM, and recognises undercroft's connectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from undercroft.errors import StoreError

if TYPE_CHECKING:
    from undercroft.config import UndercroftConfig

CONNECTOR = "UndercroftConnector"
MODULE = "undercroft.connector.connector"


def register_name() -> None:
    """Register the connector's name with vLLM, whose frontend looks up the children of a MultiConnector by name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)


def ours_in(connector: Any) -> list[Any]:
    """Undercroft's connectors: ``connector`` itself, or undercroft's children of a MultiConnector."""
    if getattr(connector, "is_undercroft", False):
        return [connector]
    return [one for child in getattr(connector, "_connectors", ()) for one in ours_in(child)]


def is_ours(kv_transfer_config: Any) -> bool:
    """Whether vLLM's configuration names undercroft's connector, and no MultiConnector."""
    return bool(kv_transfer_config.kv_connector == CONNECTOR)


def check_options(kv_transfer_config: Any, local: bool) -> None:
    """Check undercroft's options in vLLM's configuration, alone or inside MultiConnector.

    Raises ConfigError, or StoreError for a directory that the engine would refuse. ``local``: whether the engine will
    run on this machine. Then its memory and its directories are checked. Changes nothing.
    """

    def read(name: str) -> Any:
        if isinstance(kv_transfer_config, Mapping):
            return kv_transfer_config.get(name)
        return getattr(kv_transfer_config, name, None)

    extra = read("kv_connector_extra_config") or {}
    if read("kv_connector") != CONNECTOR:
        for child in extra.get("connectors") or ():
            check_options(child, local)
        return
    from undercroft.config import UndercroftConfig

    config = UndercroftConfig.parse(extra)
    if local and not config.server:
        _look_at_directories(config)


def _look_at_directories(config: UndercroftConfig) -> None:
    from undercroft import _core
    from undercroft.engine import engine_options

    for disk in _core.examine(engine_options(config)):
        if not disk["starts"]:
            raise StoreError(disk["error"])
