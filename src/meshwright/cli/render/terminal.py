"""Print an answer: rich tables on a terminal, tab-separated text in a pipe, JSON when asked.

Answers go to stdout; notes, hints and errors go to stderr.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TextIO

from meshwright.cli.render.column_widths import GAP, fit_columns, scale_bars
from meshwright.cli.result import (
    BarView,
    CommandResult,
    FieldsView,
    NoteView,
    TableView,
    TextView,
    View,
)
from meshwright.errors import InputError, MeshwrightError, MissingDependency

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

MARK_COLORS = {
    "█": "blue",
    "▓": "cyan",
    "▒": "yellow",
    "░": "magenta",
    "◆": "green",
    "▸": "bright_cyan",
    "═": "bright_yellow",
    "·": "red",
    "○": "white",
}
"""The colour of each mark that bars are drawn with; the mark alone already tells them apart."""


def print_result(answer: CommandResult, mode: str) -> None:
    """Print an answer; `mode` is `json`, `quiet` or `auto`."""
    from meshwright.cli.render.safe_text import escape_json, escape_lines, escape_view

    if mode == "json":
        envelope = {"schema": f"meshwright.{answer.schema}", **answer.data}
        text = json.dumps(envelope, indent=2, ensure_ascii=False)
        sys.stdout.write(escape_json(text) + "\n")
        return
    is_terminal = sys.stdout.isatty()
    if mode == "quiet":
        exact = not is_terminal and any(getattr(view, "verbatim", False) for view in answer.views)
        lines = answer.quiet_lines if exact else map(escape_lines, answer.quiet_lines)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return
    views = tuple(escape_view(view, is_terminal=is_terminal) for view in answer.views)
    if is_terminal:
        _pretty(views)
        return
    for index, view in enumerate(views):
        if _stands_apart(views, index):
            sys.stdout.write("\n")
        _plain(view, sys.stdout)


def print_error(error: MeshwrightError, mode: str) -> None:
    """Print what went wrong to stderr, every problem with its hint."""
    from meshwright.cli.render.safe_text import escape_json, print_to_stderr
    from meshwright.redaction import redact_logins

    if mode == "json":
        problems = [problem._asdict() for problem in getattr(error, "problems", ())]
        body = {
            "schema": "meshwright.error/1",
            "exit_code": error.exit_code,
            "error": str(error),
            "problems": problems,
        }
        text = escape_json(json.dumps(body, ensure_ascii=False))
        sys.stderr.write(redact_logins(text) + "\n")
        return
    print_to_stderr(*map(redact_logins, _error_lines(error)))


def _error_lines(error: MeshwrightError) -> list[str]:
    lines = []
    if isinstance(error, InputError):
        for problem in error.problems:
            head = f"{problem.where}: " if problem.where else ""
            lines.append(f"error: {head}{problem.what}")
            if problem.fix:
                lines.append(f"  hint: {problem.fix}")
    else:
        lines.append(f"error: {error}")
        if isinstance(error, MissingDependency) and error.hint:
            lines.append(f"  hint: {error.hint}")
    return lines


def _stands_apart(views: tuple[View, ...], index: int) -> bool:
    """Tell whether an empty line comes before a view; what follows a bar explains it."""
    return (
        index > 0
        and not isinstance(views[index], NoteView)
        and not isinstance(views[index - 1], BarView)
    )


def _plain(view: View, out: TextIO) -> None:
    match view:
        case NoteView(body):
            sys.stderr.write(f"note: {body}\n")
        case TextView(body):
            out.write(body if body.endswith("\n") else body + "\n")
        case BarView(marks, title):
            out.write(f"# {title}\n" if title else "")
            out.write(f"{marks}\n")
        case FieldsView(pairs, title):
            out.write(f"# {title}\n" if title else "")
            out.writelines(f"{name}\t{value}\n" for name, value in pairs)
        case TableView(columns, rows, title):
            out.write(f"# {title}\n" if title else "")
            out.write("\t".join(columns) + "\n")
            out.writelines("\t".join(row) + "\n" for row in rows)


def _pretty(views: tuple[View, ...]) -> None:
    from rich.console import Console

    # Rich honours NO_COLOR by itself; --no-color sets it.
    console = Console(highlight=False, markup=False)
    for index, view in enumerate(views):
        if _stands_apart(views, index):
            console.print()
        title = getattr(view, "title", "")
        if title:
            console.print(title, style="bold")
        match view:
            case NoteView(body):
                Console(stderr=True, highlight=False, markup=False).print(f"note: {body}")
            case TextView(body):
                # Things to paste must not be wrapped.
                console.print(body.rstrip("\n"), soft_wrap=True)
            case BarView(marks):
                console.print(_coloured(marks))
            case FieldsView():
                console.print(_grid(view))
            case TableView():
                widths = fit_columns(view, console.width)
                # Where even that is too wide the terminal wraps lines: Rich would cut numbers.
                least = max(console.width, sum(widths) + GAP * (len(widths) - 1))
                paper = Console(highlight=False, markup=False, width=least)
                paper.print(_rows(view, widths))


def _grid(view: FieldsView) -> "RichTable":
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in view.fields:
        grid.add_row(_coloured(name), RichText(value))
    return grid


def _rows(view: TableView, widths: Sequence[int]) -> "RichTable":
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    columns = []
    for at, (column, width) in enumerate(zip(view.columns, widths, strict=True)):
        justify: Literal["left", "right"] = "right" if column in view.right_aligned else "left"
        header = _coloured(column) if view.bar_columns else column
        drawn.add_column(header, justify=justify, overflow="fold", width=width)
        cells = [row[at] for row in view.rows]
        if column in view.bar_columns:
            columns.append([_coloured(cell) for cell in scale_bars(cells, width)])
        else:
            columns.append([RichText(cell) for cell in cells])
    for row in zip(*columns, strict=True):
        drawn.add_row(*row)
    return drawn


def _coloured(marks: str) -> "RichText":
    from rich.text import Text as RichText

    return RichText.assemble(*((mark, MARK_COLORS.get(mark, "")) for mark in marks))


def disable_color() -> None:
    """Turn colours off for everything printed after this."""
    os.environ["NO_COLOR"] = "1"
