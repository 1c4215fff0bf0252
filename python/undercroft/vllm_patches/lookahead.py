"""The patch that lets vLLM's lookahead block hashes stay on beside undercroft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from undercroft.vllm_patches.checks import needs
from undercroft.vllm_patches.table import LOOKAHEAD_HASHES, failed, guarded

_NAME = "num_hash_lookahead_tokens"


class _Lifted(property):
    """The property of vLLM's configuration with this patch."""


class _WithoutConnector:
    """vLLM's configuration as it is without a connector."""

    kv_transfer_config = None

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vllm_config, name)


@guarded(LOOKAHEAD_HASHES)
def keep_lookahead_hashes(is_ours: Callable[[Any], bool]) -> None:
    """Let the hash of a block cover the tokens after it where vLLM alone would. Patches each process once.

    ``is_ours``: whether a ``kv_transfer_config`` names undercroft and no other connector. Models with states keep
    vLLM's other hashes: vLLM may offer the state at the end of a block before the block has its hash.
    """
    from vllm.config import VllmConfig

    original = vars(VllmConfig).get(_NAME)
    if original is None or isinstance(original, _Lifted):
        return  # vLLM has no such hashes before 0.33.
    needs(isinstance(original, property), f"VllmConfig.{_NAME} is no property")

    def num_hash_lookahead_tokens(self: Any) -> int:
        found: int = original.fget(self)
        try:
            if found or self.kv_transfer_config is None or not is_ours(self.kv_transfer_config):
                return found
            return found if self.model_config.has_inner_state else int(original.fget(_WithoutConnector(self)))
        except Exception as error:
            failed(LOOKAHEAD_HASHES, error)
            return found

    num_hash_lookahead_tokens.__doc__ = original.__doc__
    setattr(VllmConfig, _NAME, _Lifted(num_hash_lookahead_tokens))
