"""One HTML file that needs nothing from outside: the head and the style that every page shares."""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from meshwright.cli.result import BarView, FieldsView, NoteView, TableView, TextView, View


def render_page(title: str, body: str, script: str = "") -> str:
    """Return the whole file around a page's body, which ends with the one script that may run."""
    policy = _content_security_policy(script)
    end = f"\n<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{read_asset('style.css')}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}{end}\n</body>\n</html>\n"
    )


def _content_security_policy(script: str) -> str:
    """Return what a page may do: nothing from outside, and no script but its own.

    So even a name that some part did not escape could run nothing and send nothing.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scripts = f"script-src 'sha256-{digest}'; " if script else ""
    return (
        f"default-src 'none'; {scripts}style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def read_asset(name: str) -> str:
    """A file of `report/`, to stand inside a page."""
    return (files("meshwright.cli.render") / name).read_text(encoding="utf-8")


def render_fields(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, one below another."""
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f'<dl class="head">{cells}</dl>'


def render_chart_page(title: str, svg: str, views: Sequence[View]) -> str:
    """Return the whole file."""
    # Inside HTML a picture has neither an XML head nor a document type.
    picture = re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)
    body = "\n".join(map(render_view, views))
    return render_page(title, f'<div class="picture">{picture}</div>\n{body}')


def render_view(view: View) -> str:
    """Return a part of an answer as a part of a page."""
    match view:
        case NoteView(body):
            return f'<p class="note">{escape(body)}</p>'
        case TextView(body) | BarView(body):
            return f"<pre>{escape(body)}</pre>"
        case FieldsView(rows, title):
            return f"{_heading(title)}{render_fields(rows)}"
        case TableView():
            return _table(view)


def _table(view: TableView) -> str:
    marks = [' class="number"' if name in view.right_aligned else "" for name in view.columns]
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
