"""The KV connector: the scheduler's half, the workers' halves, and the messages between them."""
