"""The entry point of vLLM's plugin system: makes the connector known by its name.

vLLM calls it in each of its processes, sometimes more than once.
"""

from __future__ import annotations

from typing import Any

CONNECTOR = "UndercroftConnector"
MODULE = "undercroft.connector.connector"


def register() -> None:
    """Register the connector's name. Does nothing the second time."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from undercroft import compat

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    compat.recompute_failed_loads(is_ours)


def is_ours(connector: Any) -> bool:
    """Whether a connector is undercroft's, or a MultiConnector with it as a child."""
    from undercroft.connector.connector import UndercroftConnector

    if isinstance(connector, UndercroftConnector):
        return True
    return any(is_ours(child) for child in getattr(connector, "_connectors", ()))
