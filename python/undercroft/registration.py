"""The connector's name in vLLM: how it is registered, and how an object is recognised as undercroft's connector."""

from __future__ import annotations

from typing import Any

CONNECTOR = "UndercroftConnector"
MODULE = "undercroft.connector.connector"


def register_name() -> None:
    """Register the connector's name with vLLM, whose frontend looks up the children of a MultiConnector by name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)


def is_ours(connector: Any) -> bool:
    """Whether a connector is undercroft's, or a MultiConnector with undercroft's as a child."""
    if getattr(connector, "is_undercroft", False):
        return True
    return any(is_ours(child) for child in getattr(connector, "_connectors", ()))
