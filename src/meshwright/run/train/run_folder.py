"""The folder of a run: one process at a time, its configuration, and what an earlier try left.

config.toml      the job, as `mw train` reads it, with whole paths
metrics.jsonl    a row of figures for each step
checkpoints/     what the run goes on from
timeline/        what each of several ranks did, and profiled steps; see `recording`
report.html      curves and how it ended
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.shards import is_shards
from meshwright.run.train.job import Job
from meshwright.run.train.job_file import dump_job
from meshwright.timeline.paths import refusals

ROWS = "metrics.jsonl"
_LOCK = ".lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a run's folder for this process; another one that trains there is refused.

    So is a folder of tokens. A folder made here in which nothing was begun is removed.
    """
    if is_shards(folder):
        what = "holds tokenised text, which a run is kept apart from"
        raise InputError([Problem(str(folder), what, "give this run a folder of its own")])
    with refusals(folder, "written"):
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another process trains in this folder"
            fix = "wait for it, or give this run a folder of its own"
            raise InputError([Problem(str(folder), what, fix)]) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        if is_new and folder.is_dir() and _names(folder) == {_LOCK}:
            (folder / _LOCK).unlink()
            folder.rmdir()
        os.close(lock)


def holds_run(folder: Path) -> bool:
    """Tell whether a folder holds a run, or what a try left of one."""
    return folder.is_dir() and bool(_names(folder) & {"config.toml", ROWS, "checkpoints"})


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def set_rows_aside(folder: Path) -> Path | None:
    """Rename the rows of a try that ended before its first checkpoint; None where there are none.

    Nothing goes on from them, and they are somebody's figures all the same.
    """
    rows = folder / ROWS
    if not rows.exists() or not rows.stat().st_size:
        return None
    number = 1
    while (aside := folder / f"metrics.{number}.jsonl").exists():
        number += 1
    return rows.rename(aside)


def write_config(job: Job, folder: Path) -> None:
    """Write the job into its folder, in one step."""
    new = folder / ".config.toml.new"
    new.write_text(dump_job(job), encoding="utf-8")
    new.replace(folder / "config.toml")
