"""A model's KV cache from its configuration alone, without vLLM: for `undercroft size` and `undercroft estimate`."""
