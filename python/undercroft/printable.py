"""Text of others on its way to a log or a terminal.

Clients choose request ids and names of pins, stores choose the texts of their errors, and whoever may write a directory
chooses names in it. A line break in such a text forges a line of a log, and an escape sequence rewrites a terminal.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line, with escapes such as ``\\x1b`` in place of characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(ord(one)) for one in text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
