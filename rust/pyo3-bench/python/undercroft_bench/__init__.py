"""Benchmarks of undercroft, which ``undercroft bench`` runs. No server and no vLLM loads them."""
