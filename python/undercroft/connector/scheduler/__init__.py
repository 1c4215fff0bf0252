"""The scheduler's half of the connector."""
