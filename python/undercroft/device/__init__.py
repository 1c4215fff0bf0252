"""The device's side: the layout of vLLM's KV cache pages, and the copiers between these pages and the arena."""

from __future__ import annotations
