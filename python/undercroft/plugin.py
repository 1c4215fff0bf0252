"""The entry point of vLLM's plugin system: makes the connector known by its name.

vLLM calls it in each of its processes, sometimes more than once.
"""

from __future__ import annotations

import logging
from typing import Any

CONNECTOR = "UndercroftConnector"
MODULE = "undercroft.connector.connector"
logger = logging.getLogger("vllm.undercroft")


def register() -> None:
    """Register the connector's name, and put our hooks into vLLM. Does nothing the second time."""
    from undercroft import compat, threshold

    register_name()
    threshold.install()
    try:
        compat.recompute_failed_loads(is_ours)
    except Exception as error:
        logger.warning(
            'undercroft: as a child of MultiConnector set kv_load_failure_policy to "recompute" yourself: %s', error
        )


def register_name() -> None:
    """Make the connector known by its name: vLLM's frontend looks a child of MultiConnector up by it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)


def is_ours(connector: Any) -> bool:
    """Whether a connector is undercroft's, or a MultiConnector with it as a child."""
    from undercroft.connector.connector import UndercroftConnector

    if isinstance(connector, UndercroftConnector):
        return True
    return any(is_ours(child) for child in getattr(connector, "_connectors", ()))
