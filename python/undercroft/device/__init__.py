"""The device's side: where vLLM's KV cache pages lie, and what copies them to the arena and back."""

from __future__ import annotations
