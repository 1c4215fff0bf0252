"""The KV connector: the scheduler's half, the workers' halves, and what goes between them."""
