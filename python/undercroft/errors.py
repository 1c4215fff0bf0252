"""Every error that undercroft raises on purpose. Messages name the finding, the allowed values and the remedy.

Pure Python, so that both extension modules raise the same classes, and configuration is read without either.
"""

from __future__ import annotations


def cause(error: Exception) -> str:
    """The reason of an error, for a message that names the file: without Python's number and without the name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class UndercroftError(Exception):
    """Base of all errors here."""


class ConfigError(UndercroftError):
    """An option's value is not possible, on this machine or on any. The operator must change it."""


class StoreError(UndercroftError):
    """A directory of the disk tier is foreign, damaged, of another format version, full, or in use. The operator must
    look at the directory."""


class ServerError(UndercroftError):
    """A server does not answer, or is another user's."""
