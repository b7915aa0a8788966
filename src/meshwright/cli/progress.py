"""A progress bar on stderr for anything over a second; silent in pipes and when asked to be."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]
"""Told how many more units are done."""


@contextmanager
def progress(label: str, total: int, *, quiet: bool = False) -> Iterator[Advance]:
    """Show a bar while the block runs, if a person is watching."""
    if quiet or not sys.stderr.isatty() or os.environ.get("MESHWRIGHT_NO_PROGRESS"):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)
