"""One HTML file that needs nothing from outside: the head and the style that every page shares."""

from collections.abc import Iterable
from html import escape
from importlib.resources import files


def document(title: str, body: str) -> str:
    """Return the whole file around a page's body."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{asset('style.css')}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """A file of `report/`, to stand inside a page."""
    return (files("meshwright.cli") / "report" / name).read_text(encoding="utf-8")


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, one below another."""
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f'<dl class="head">{cells}</dl>'
