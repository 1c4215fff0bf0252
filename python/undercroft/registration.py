"""Registers the connector's name with vLLM, and recognises undercroft's connectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from undercroft.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from undercroft.config import UndercroftConfig

CONNECTOR = "UndercroftConnector"
MODULE = "undercroft.connector.connector"
EXTRA = "kv_connector_extra_config"


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


def tiers_in(connector: Any) -> list[tuple[Any, Any]]:
    """Undercroft's tiers in vLLM's offloading, each with the connector that has it, also inside a MultiConnector."""
    found = [(tier, one) for child in getattr(connector, "_connectors", ()) for tier, one in tiers_in(child)]
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    tiers = [one for one in getattr(manager, "secondary_tiers", ()) if getattr(one, "is_undercroft", False)]
    return found + [(tier, connector) for tier in tiers]


def caches_in(connector: Any) -> list[Any]:
    """Undercroft's connectors and tiers: all that have ``resets``."""
    return [*ours_in(connector), *(tier for tier, _ in tiers_in(connector))]


def is_ours(kv_transfer_config: Any) -> bool:
    """Whether vLLM's configuration names undercroft's connector, and no MultiConnector."""
    return bool(kv_transfer_config.kv_connector == CONNECTOR)


def check_options(kv_transfer_config: Any, local: bool) -> None:
    """Check undercroft's options in vLLM's configuration, alone, inside MultiConnector, or as a tier of vLLM's
    offloading.

    Raises ConfigError, or StoreError for a directory that the engine would refuse. ``local``: whether the engine will
    run on this machine. Then its memory and its directories are checked. Changes nothing.
    """

    def read(name: str) -> Any:
        if isinstance(kv_transfer_config, Mapping):
            return kv_transfer_config.get(name)
        return getattr(kv_transfer_config, name, None)

    extra = read(EXTRA) or {}
    if read("kv_connector") != CONNECTOR:
        children = extra.get("connectors") or ()
        for child in children:
            check_options(child, local)
        _refuse_both(children)
        if not extra.get("secondary_tiers"):
            return
    for config in options_in(str(read("kv_connector")), extra):
        if local and not config.server:
            _look_at_directories(config)


def _refuse_both(children: Iterable[Any]) -> None:
    """Raise ConfigError for children of a MultiConnector that are undercroft's connector and its tier: a block would be
    kept twice, and both have the same metrics."""
    found = [
        child["kv_connector"]
        for child in children
        if isinstance(child, Mapping) and options_in(str(child.get("kv_connector")), child.get(EXTRA) or {})
    ]
    if CONNECTOR in found and set(found) != {CONNECTOR}:
        raise ConfigError(
            f"undercroft: {' and '.join(found)} in one MultiConnector: undercroft is the connector, or a tier of "
            "vLLM's offloading, not both. Leave one of them out."
        )


def options_in(kv_connector: str, extra_config: Mapping[str, Any]) -> list[UndercroftConfig]:
    """Undercroft's options in a connector's: of undercroft's connector, or of its tiers in vLLM's offloading; empty for
    any other connector. Raises ConfigError."""
    if kv_connector == CONNECTOR:
        from undercroft.config import UndercroftConfig

        return [UndercroftConfig.parse(extra_config)]
    from undercroft.vllm_tier import options

    return options.check(kv_connector, extra_config)


def _look_at_directories(config: UndercroftConfig) -> None:
    from undercroft import _core
    from undercroft.engine import engine_options

    for disk in _core.examine(engine_options(config)):
        if not disk["starts"]:
            raise StoreError(disk["error"])
