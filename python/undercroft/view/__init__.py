"""A picture of running engines, from their status or their metrics; the terminal and the server's page show it."""
