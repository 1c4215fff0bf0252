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


def ours_in(connector: Any) -> list[Any]:
    """Undercroft's connectors: the given one, or those inside it if it is a MultiConnector."""
    if getattr(connector, "is_undercroft", False):
        return [connector]
    return [one for child in getattr(connector, "_connectors", ()) for one in ours_in(child)]
