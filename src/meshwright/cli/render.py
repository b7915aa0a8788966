"""Print an answer: rich tables on a terminal, tab-separated text in a pipe, JSON when asked.

Answers go to stdout; notes, hints and errors go to stderr.
"""

import json
import os
import sys
from typing import TYPE_CHECKING, Literal, TextIO

from meshwright.cli.answer import Answer, Facts, Note, Table, Text, View
from meshwright.errors import InputError, MeshwrightError, MissingPart

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def show(answer: Answer, mode: str) -> None:
    """Print an answer; `mode` is `json`, `quiet` or `auto`."""
    if mode == "json":
        envelope = {"schema": f"meshwright.{answer.schema}", **answer.data}
        sys.stdout.write(json.dumps(envelope, indent=2, ensure_ascii=False) + "\n")
    elif mode == "quiet":
        sys.stdout.writelines(f"{line}\n" for line in answer.quiet)
    elif sys.stdout.isatty():
        _pretty(answer.views)
    else:
        for index, view in enumerate(answer.views):
            if index and not isinstance(view, Note):
                sys.stdout.write("\n")
            _plain(view, sys.stdout)


def show_error(error: MeshwrightError, mode: str) -> None:
    """Print what went wrong to stderr, every problem with its hint."""
    if mode == "json":
        problems = [problem._asdict() for problem in getattr(error, "problems", ())]
        body = {
            "schema": "meshwright.error/1",
            "exit_code": error.exit_code,
            "error": str(error),
            "problems": problems,
        }
        sys.stderr.write(json.dumps(body, ensure_ascii=False) + "\n")
        return
    for line in _error_lines(error):
        sys.stderr.write(line + "\n")


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
        if isinstance(error, MissingPart) and error.hint:
            lines.append(f"  hint: {error.hint}")
    return lines


def _plain(view: View, out: TextIO) -> None:
    match view:
        case Note(body):
            sys.stderr.write(f"note: {body}\n")
        case Text(body):
            out.write(body if body.endswith("\n") else body + "\n")
        case Facts(pairs, title):
            out.write(f"# {title}\n" if title else "")
            out.writelines(f"{name}\t{value}\n" for name, value in pairs)
        case Table(columns, rows, title):
            out.write(f"# {title}\n" if title else "")
            out.write("\t".join(columns) + "\n")
            out.writelines("\t".join(row) + "\n" for row in rows)


def _pretty(views: tuple[View, ...]) -> None:
    from rich.console import Console

    # Rich honours NO_COLOR by itself; --no-color sets it.
    console = Console(highlight=False, markup=False)
    for index, view in enumerate(views):
        if index and not isinstance(view, Note):
            console.print()
        title = getattr(view, "title", "")
        if title:
            console.print(title, style="bold")
        match view:
            case Note(body):
                Console(stderr=True, highlight=False, markup=False).print(f"note: {body}")
            case Text(body):
                # Things to paste must not be wrapped.
                console.print(body.rstrip("\n"), soft_wrap=True)
            case Facts():
                console.print(_grid(view))
            case Table():
                console.print(_rows(view))


def _grid(view: Facts) -> "RichTable":
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in view.pairs:
        grid.add_row(RichText(name), RichText(value))
    return grid


def _rows(view: Table) -> "RichTable":
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in view.columns:
        justify: Literal["left", "right"] = "right" if column in view.right else "left"
        drawn.add_column(column, justify=justify, overflow="fold", no_wrap=column not in view.wide)
    for row in view.rows:
        drawn.add_row(*(RichText(cell) for cell in row))
    return drawn


def silence_colour() -> None:
    """Turn colours off for everything printed after this."""
    os.environ["NO_COLOR"] = "1"
