"""Every error that undercroft raises on purpose. Messages name the finding, the allowed values and the remedy.

Pure Python, so that both extension modules raise the same classes, and configuration is read without either.
"""

from __future__ import annotations


class UndercroftError(Exception):
    """Base of all of them."""


class ConfigError(UndercroftError):
    """An option's value is not possible, here or anywhere: the operator changes it."""


class StoreError(UndercroftError):
    """A directory of the disk tier is foreign, damaged, of another format version, full, or in use: the operator looks
    at it."""


class ServerError(UndercroftError):
    """A server does not answer, or is another user's."""
