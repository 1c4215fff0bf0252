"""A demonstration: a real vLLM server with undercroft, a small model, and a restart."""
