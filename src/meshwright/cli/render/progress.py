"""How far a command is, on one line of stderr; silent in pipes and when asked to be."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshwright.control_characters import escape_control_characters
from meshwright.predict.plan.search.branch_and_bound import PlanProgress, Report
from meshwright.spec.units import format_seconds

SetLabel = Callable[[str], None]
"""Told what is searched now."""


def _is_watched(*, quiet: bool) -> bool:
    """Return whether a person watches stderr and wants to see progress there."""
    return not quiet and sys.stderr.isatty() and not os.environ.get("MESHWRIGHT_NO_PROGRESS")


class ProgressLine:
    """A line of free text that replaces itself, if a person is watching; its block clears it."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._shown = _is_watched(quiet=quiet)

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """Show a text in place of the one before."""
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{escape_control_characters(text)}")
            sys.stderr.flush()


@contextmanager
def show_search_progress(
    label: str, *, quiet: bool = False
) -> Iterator[tuple[Report | None, SetLabel]]:
    """Show the best step, its bound and the gap between while the block runs."""
    if not _is_watched(quiet=quiet):
        yield None, lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Drawn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
    )
    with Drawn(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(label, total=None, state="")

        def report(progress: PlanProgress) -> None:
            if progress.best_step_s is None:
                drawn.update(task, total=None, state=format_search_progress(progress))
            else:
                # The bar fills as the bound closes in on the best step.
                share = min(1.0, progress.bound_s / progress.best_step_s)
                drawn.update(
                    task, total=1.0, completed=share, state=format_search_progress(progress)
                )

        yield report, lambda text: drawn.update(task, description=text, total=None, state="")


def format_search_progress(progress: PlanProgress) -> str:
    """Say how far a search is."""
    if progress.best_step_s is None:
        return f"nothing fits yet, {progress.open_nodes:,} waiting"
    gap = max(0.0, 1 - progress.bound_s / progress.best_step_s)
    return (
        f"best {format_seconds(progress.best_step_s)}, bound {format_seconds(progress.bound_s)}, "
        f"gap {gap:.1%}"
    )


Advance = Callable[[int], None]
"""Told how many more units are done."""


@contextmanager
def show_progress(label: str, total: int, *, quiet: bool = False) -> Iterator[Advance]:
    """Show a bar while the block runs, if a person is watching."""
    if not _is_watched(quiet=quiet):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)
