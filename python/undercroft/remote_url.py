"""Checks URLs of remote stores before the core reads them, and removes credentials from values for messages."""

from __future__ import annotations

import re
from typing import TypeVar

from undercroft.key_file import is_key

SCHEMES = ("file", "s3", "gs", "az", "redis", "rediss", "mooncake")
"""Kinds of stores; rediss is Redis over TLS."""
REMOTE_FORMAT = (
    '"file:///directory", "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix", "redis://host:6379/0", '
    '"rediss://host:6379/0" or "mooncake://host:50051/prefix"'
)
"""The URLs that `check_remote` accepts, for messages."""

_T = TypeVar("_T")


def check_remote(value: object) -> str:
    """The URL, or an empty text for no store. Raises ValueError; its text has the reason and never a password."""
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of a URL")
    if not value:
        return ""
    scheme, found, rest = value.partition("://")
    if not found:
        raise ValueError("no URL")
    if scheme not in SCHEMES:
        raise ValueError("an unknown scheme")
    if scheme == "file":
        if not rest.startswith("/") or not rest.strip("/"):
            raise ValueError("no absolute path of a directory")
        return value
    # Only URLs of Mooncake have parameters. The core reads them.
    rest, _, parameters = rest.partition("?") if scheme == "mooncake" else (rest, "", "")
    host = rest.partition("/")[0]
    if "@" in host or "@" in parameters:
        raise ValueError(
            "credentials in the URL, which is logged. Set them in the environment instead, such as REDIS_PASSWORD or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not host:
        raise ValueError("no host or bucket")
    if "?" in rest or "#" in rest:
        raise ValueError("parameters. Set endpoint and region in the environment, such as AWS_ENDPOINT_URL")
    return value


def without_credentials(value: _T) -> _T | str:
    """The value for a message: without any part of a key, and without the part of a URL before an @."""
    if not isinstance(value, str) or value.startswith("file:"):
        return value
    if is_key(value):
        return "..."
    return re.sub(r"://.*@", "://...@", value)
