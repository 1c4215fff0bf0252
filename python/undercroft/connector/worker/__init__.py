"""The worker's half of the connector."""
