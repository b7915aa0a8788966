"""Views, JSON and lines in which no control character of a foreign name is left.

A name of a kernel, a job or a file may come from anybody. Text that is asked for as it stands (a
configuration, a script, metrics) keeps its characters in a pipe, never on a terminal.
"""

import re
import sys
from typing import Any

from meshwright.cli.result import BarView, FieldsView, NoteView, TableView, TextView, View
from meshwright.control_characters import escape_control_characters

_NEITHER_PRINTED_NOR_ESCAPED = re.compile(
    "[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb]"
)


def escape_view(view: View, *, is_terminal: bool) -> View:
    """Return a view whose texts can be printed; a cell of a table in a pipe is one line."""
    match view:
        case NoteView(body):
            return NoteView(escape_lines(body))
        case TextView(body, verbatim):
            return view if verbatim and not is_terminal else TextView(escape_lines(body))
        case BarView(marks, title):
            return BarView(_word(marks), _word(title))
        case FieldsView(fields, title):
            return FieldsView(
                tuple((_word(name), _cell(value, is_terminal)) for name, value in fields),
                _word(title),
            )
        case TableView():
            return view._replace(
                columns=tuple(map(_word, view.columns)),
                rows=tuple(tuple(_cell(cell, is_terminal) for cell in row) for row in view.rows),
                title=_word(view.title),
                right_aligned=frozenset(map(_word, view.right_aligned)),
                wrapped=frozenset(map(_word, view.wrapped)),
                bar_columns=frozenset(map(_word, view.bar_columns)),
            )


def escape_json(text: str) -> str:
    """Return JSON of the same value, in which every control character is written as its code."""
    return _NEITHER_PRINTED_NOR_ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def escape_lines(text: str) -> str:
    """Return a text of several lines that can be printed."""
    return escape_control_characters(text, keep_lines=True)


def print_to_stderr(*lines: Any) -> None:
    """Print lines for people, whatever names stand in them."""
    for line in lines:
        sys.stderr.write(f"{escape_lines(str(line))}\n")
    sys.stderr.flush()


def _word(text: str) -> str:
    return escape_control_characters(text)


def _cell(text: str, is_terminal: bool) -> str:
    return escape_control_characters(text, keep_lines=is_terminal)
