"""Benchmarks of undercroft: what ``undercroft bench`` runs. No server and no vLLM loads them."""
