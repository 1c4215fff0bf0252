"""The patch that lets a tier of vLLM's offloading see what vLLM shows to connectors only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from undercroft.vllm_patches.checks import takes
from undercroft.vllm_patches.table import OFFLOADING_TIERS, failed, guarded, replace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_making: list[tuple[VllmConfig, KVCacheConfig]] = []
"""The configurations of the connectors that are being made, the outermost first."""


def configuration_of_tier() -> tuple[VllmConfig, KVCacheConfig] | None:
    """The configuration of the connector whose tiers are being made; None if this is not known."""
    return _making[-1] if _making else None


@guarded(OFFLOADING_TIERS)
def show_to_tiers(tiers_in: Callable[[Any], Iterable[tuple[Any, Any]]]) -> None:
    """Let tiers see the configuration while they are made, and then the calls to their connectors.

    ``tiers_in`` finds undercroft's tiers in a connector, each with the connector that has it. A tier has the methods
    ``bind``, ``arrives``, ``is_asked``, ``is_scheduled``, ``step_ends`` and ``is_reset``.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    takes(KVConnectorFactory, "create_connector", "config", "role", "kv_cache_config")

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_connector(config: Any, role: Any, kv_cache_config: Any) -> Any:
            _making.append((config, kv_cache_config))
            try:
                connector = original(config, role, kv_cache_config)
            finally:
                _making.pop()
            try:
                for tier, owner in tiers_in(connector):
                    _show(owner, tier)
            except Exception as error:  # The tier then answers every lookup with a miss.
                failed(OFFLOADING_TIERS, error)
            return connector

        return create_connector

    replace((KVConnectorFactory, "create_connector", wrap))


def _show(connector: Any, tier: Any) -> None:
    """Tell a tier of the calls to its connector."""

    def before(hook: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def told(*args: Any, **kwargs: Any) -> Any:
                try:
                    hook(*args, **kwargs)
                except Exception as error:  # vLLM's own call proceeds in any case.
                    failed(OFFLOADING_TIERS, error)
                return original(*args, **kwargs)

            return told

        return wrap

    def wrap_question(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> Any:
            try:
                is_later = tier.is_asked(request, num_computed_tokens)
            except Exception as error:
                failed(OFFLOADING_TIERS, error)
                is_later = False
            return (None, False) if is_later else original(request, num_computed_tokens, *args, **kwargs)

        return get_num_new_matched_tokens

    def wrap_reset(original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_cache(*args: Any, **kwargs: Any) -> Any:
            # Both are reset, whatever the other one answers.
            answer = original(*args, **kwargs)
            try:
                return tier.is_reset() and answer
            except Exception as error:
                failed(OFFLOADING_TIERS, error)
                return False

        return reset_cache

    tier.bind(connector)
    replace(
        (connector, "on_new_request", before(tier.arrives)),
        (connector, "get_num_new_matched_tokens", wrap_question),
        (connector, "build_connector_meta", before(tier.is_scheduled)),
        (connector, "get_kv_connector_stats", before(tier.step_ends)),
        (connector, "reset_cache", wrap_reset),
        again=True,
    )
