"""The ``undercroft`` command."""
