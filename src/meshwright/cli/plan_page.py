"""A picture and the answer beside it as one HTML file, which needs nothing from outside."""

import re
from collections.abc import Sequence
from html import escape

from meshwright.cli.answer import Bar, Facts, Note, Table, Text, View
from meshwright.cli.document import document, pairs


def page(title: str, svg: str, views: Sequence[View]) -> str:
    """Return the whole file."""
    # Inside HTML a picture has neither an XML head nor a document type.
    picture = re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)
    body = "\n".join(map(view_html, views))
    return document(title, f'<div class="picture">{picture}</div>\n{body}')


def view_html(view: View) -> str:
    """Return a part of an answer as a part of a page."""
    match view:
        case Note(body):
            return f'<p class="note">{escape(body)}</p>'
        case Text(body) | Bar(body):
            return f"<pre>{escape(body)}</pre>"
        case Facts(rows, title):
            return f"{_heading(title)}{pairs(rows)}"
        case Table():
            return _table(view)


def _table(view: Table) -> str:
    marks = [' class="number"' if name in view.right else "" for name in view.columns]
    head = "".join(f"<th{m}>{escape(c)}</th>" for c, m in zip(view.columns, marks, strict=True))
    rows = "".join(
        "<tr>"
        + "".join(f"<td{m}>{escape(c)}</td>" for c, m in zip(row, marks, strict=True))
        + "</tr>\n"
        for row in view.rows
    )
    return (
        f'{_heading(view.title)}<div class="wide-table still"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{rows}</tbody></table></div>"
    )


def _heading(title: str) -> str:
    return f"<h2>{escape(title)}</h2>" if title else ""
