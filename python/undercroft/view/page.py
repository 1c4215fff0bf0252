"""The picture as a page for a browser: no script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from undercroft.printable import printable
from undercroft.view.tables import Alarm, Table

REFRESH_S = 5
POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""The page's Content-Security-Policy: whatever text gets into the page, the browser runs and loads nothing."""
STYLE = files("undercroft.view").joinpath("page.css").read_text(encoding="utf-8")


def html(title: str, shown: Sequence[Table]) -> str:
    """The page, which a browser reads again every few seconds."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(printable(title))}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}"><style>{STYLE}</style></head>'
        f"<body>{body(title, shown)}</body></html>\n"
    )


def body(title: str, shown: Sequence[Table]) -> str:
    """The content of the page."""
    return (
        f"<main><h1>{escape(printable(title))}</h1>{''.join(map(_table, shown))}</main>"
        f'<footer><p>Read again every {REFRESH_S} seconds. <a href="status">status</a> as JSON, '
        '<a href="metrics">metrics</a>, <a href="health">health</a></p></footer>'
    )


def _table(table: Table) -> str:
    names = [escape(name) for name in table.header]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "".join(f"<tr>{''.join(map(_cell, names, row))}</tr>" for row in table.rows)
    title = escape(table.title)
    return f"<section><h2>{title}</h2><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"


def _cell(name: str, text: str) -> str:
    alarm = ' class="alarm"' if isinstance(text, Alarm) else ""
    return f'<td data-name="{name}"{alarm}>{escape(printable(text))}</td>'
