"""Checks URLs of remote stores before the core reads them, and removes credentials from values for messages."""

from __future__ import annotations

import re
from typing import TypeVar, cast

from undercroft.key_file import is_key

SCHEMES = ("file", "s3", "gs", "az", "redis", "rediss", "mooncake")
"""Kinds of stores; rediss is Redis over TLS."""
REMOTE_FORMAT = (
    '"file:///directory", "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix", "redis://host:6379/0", '
    '"rediss://host:6379/0" or "mooncake://host:50051/prefix"'
)
"""The URLs that `check_remote` accepts, for messages."""

_WITH_BUCKET = ("s3", "gs", "az")
_BUCKET = re.compile(r"[A-Za-z0-9._-]*\Z")
_CREDENTIAL = re.compile(
    r"passw|secret|credential|(access|account|api)_?key|(session|auth|sas|bearer)_?token", re.IGNORECASE
)

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
    # A secret may have a slash: it may stand anywhere before the @.
    if "@" in rest:
        raise ValueError(
            "credentials in the URL, which is logged. Set them in the environment instead, such as REDIS_PASSWORD or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    # Only URLs of Mooncake have parameters. The core reads them.
    rest = rest.partition("?")[0] if scheme == "mooncake" else rest
    host = rest.partition("/")[0]
    if not host:
        raise ValueError("no host or bucket")
    if scheme in _WITH_BUCKET and not _BUCKET.match(host):
        raise ValueError(
            "the name of a bucket or container has letters, digits, '-', '.' and '_' only. Set a key and its secret in "
            "the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and the store's address, such as "
            "AWS_ENDPOINT_URL"
        )
    if "?" in rest or "#" in rest:
        raise ValueError("parameters. Set endpoint and region in the environment, such as AWS_ENDPOINT_URL")
    return value


def is_credential(name: str) -> bool:
    """Whether an option of this name would hold a credential."""
    return _CREDENTIAL.search(name) is not None


def without_credentials(value: _T) -> _T | str:
    """The value for a message: without any part of a key, and without the parts of a URL that may be credentials."""
    if isinstance(value, list):
        return cast(_T, [without_credentials(each) for each in value])
    if isinstance(value, dict):
        shown = {name: "..." if is_credential(str(name)) else without_credentials(of) for name, of in value.items()}
        return cast(_T, shown)
    if not isinstance(value, str):
        return value
    if is_key(value):
        return "..."
    scheme, found, rest = value.partition("://")
    if not found:
        # "user:password@host"
        return re.sub(r"^[^/]*:.*@", "...@", value, flags=re.DOTALL)
    if scheme == "file":
        host, slash, path = rest.partition("/")
        return f"{scheme}://{_behind_at(host)}{slash}{path}"
    rest, parameters, _ = _behind_at(rest).partition("?")
    host = rest.partition("/")[0]
    if scheme in _WITH_BUCKET and host and not host.startswith("...@") and not _BUCKET.match(host):
        return f"{scheme}://..."
    return f"{scheme.rpartition('@')[2]}://{rest}" + ("?..." if parameters else "")


def _behind_at(text: str) -> str:
    _, at, behind = text.rpartition("@")
    return f"...@{behind}" if at else text
