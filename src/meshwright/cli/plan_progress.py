"""How far a search is, on one line of stderr; silent in pipes and when asked to be."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshwright.predict.plan.search import Progress, Report
from meshwright.spec.units import format_seconds

Rename = Callable[[str], None]
"""Told what is searched now."""


@contextmanager
def searching(label: str, *, quiet: bool = False) -> Iterator[tuple[Report | None, Rename]]:
    """Show the best step, its bound and the gap between while the block runs."""
    if quiet or not sys.stderr.isatty() or os.environ.get("MESHWRIGHT_NO_PROGRESS"):
        yield None, lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Drawn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Drawn(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(label, total=None, state="")

        def report(progress: Progress) -> None:
            if progress.best_s is None:
                drawn.update(task, total=None, state=state(progress))
            else:
                # The bar fills as the bound closes in on the best step.
                share = min(1.0, progress.bound_s / progress.best_s)
                drawn.update(task, total=1.0, completed=share, state=state(progress))

        yield report, lambda text: drawn.update(task, description=text, total=None, state="")


def state(progress: Progress) -> str:
    """Say how far a search is."""
    if progress.best_s is None:
        return f"nothing fits yet, {progress.waiting:,} waiting"
    gap = max(0.0, 1 - progress.bound_s / progress.best_s)
    return (
        f"best {format_seconds(progress.best_s)}, bound {format_seconds(progress.bound_s)}, "
        f"gap {gap:.1%}"
    )
