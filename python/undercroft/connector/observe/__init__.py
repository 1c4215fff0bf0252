"""Statistics, metrics, events and records of the connector."""
