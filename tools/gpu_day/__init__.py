"""A day on a rented GPU, as one command: the bundle that such a machine needs, the table of steps, and their runner."""
