"""A picture and the answer beside it as one HTML file, which needs nothing from outside."""

import re
from collections.abc import Sequence
from html import escape

from meshwright.cli.answer import Bar, Facts, Note, Table, Text, View

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 1.8rem 0 0.4rem; }
svg { width: 100%; height: auto; max-width: 56rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
th { text-align: left; border-bottom: 1px solid #888; font-weight: 600; }
td, th { padding: 0.15rem 1rem 0.15rem 0; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.1rem 1rem; }
dt { color: #666; } dd { margin: 0; }
pre { background: #f5f5f5; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
p.note { color: #666; font-size: 0.9rem; }
div.wide { overflow-x: auto; }
""".strip()


def page(title: str, svg: str, views: Sequence[View]) -> str:
    """Return the whole file."""
    # Inside HTML a picture has neither an XML head nor a document type.
    picture = re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)
    body = "\n".join(_html(view) for view in views)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{picture}\n{body}\n</body>\n</html>\n"
    )


def _html(view: View) -> str:
    match view:
        case Note(body):
            return f'<p class="note">{escape(body)}</p>'
        case Text(body) | Bar(body):
            return f"<pre>{escape(body)}</pre>"
        case Facts(pairs, title):
            rows = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in pairs)
            return f"{_heading(title)}<dl>{rows}</dl>"
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
        f'{_heading(view.title)}<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{rows}</tbody></table></div>"
    )


def _heading(title: str) -> str:
    return f"<h2>{escape(title)}</h2>" if title else ""
