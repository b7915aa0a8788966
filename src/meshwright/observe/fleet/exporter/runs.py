"""What jobs tell of themselves: folders of our trainer's runs, and of `mw watch`.

Figures come from the newest rows; seconds spent in steps and in waiting for data add up, so that a
server takes their rate over whatever time it likes.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.observe.twin.drift_run import ROWS, Rows

_STATUS = "status.json"


class Told(NamedTuple):
    """One figure of one job."""

    name: str
    help: str
    labels: dict[str, str]
    value: float
    counter: bool = False


class Followed(NamedTuple):
    """A folder, and the job that writes there."""

    folder: Path
    job: str

    @classmethod
    def parse(cls, text: str) -> "Followed":
        """Read `FOLDER` or `FOLDER=JOB`; without a job the folder's name is its own."""
        path, _, job = text.partition("=")
        folder = Path(path)
        if not folder.is_dir():
            fix = "name the folder of a run of mw train or of mw watch"
            raise InputError([Problem(path, "is no folder", fix)])
        return cls(folder, job or folder.resolve().name)


class _Run:
    """The rows of a run, added up as they come."""

    def __init__(self, followed: Followed) -> None:
        self._rows, self._labels = Rows(followed.folder / ROWS), {"hpc_job": followed.job}
        self._step, self._step_s, self._wait_s = 0, 0.0, 0.0
        self._newest: dict[str, Any] = {}

    def figures(self) -> Iterator[Told]:
        for row in self._rows.new():
            # A row may stand for the steps since the one before, which took about as long.
            took_s = max(1, row["step"] - self._step) * float(row["step_s"])
            if not self._newest:
                took_s = float(row["step_s"])
            self._step_s += took_s
            self._wait_s += took_s * float(row.get("data_wait_share") or 0.0)
            self._step, self._newest = row["step"], row
        if not self._newest:
            return
        yield Told("mw_job_step", "The newest step", self._labels, self._step)
        yield Told("mw_job_step_seconds_total", "Time in steps", self._labels, self._step_s, True)
        yield Told("mw_job_data_wait_seconds_total", "Time in steps that waited for data",
                   self._labels, self._wait_s, True)  # fmt: skip
        for field, name, text in (
            ("step_s", "mw_job_step_seconds", "What the newest step took"),
            ("data_wait_share", "mw_job_data_wait_ratio", "Its share of waiting for data"),
            ("tokens_per_s", "mw_job_tokens_per_second", "Tokens a second in it"),
            ("mfu", "mw_job_mfu_ratio", "Its share of the device's peak"),
        ):
            value = self._newest.get(field)
            if isinstance(value, float | int):
                yield Told(name, text, self._labels, float(value))


class _Watch:
    """The status that `mw watch` keeps beside a job of any making."""

    def __init__(self, followed: Followed) -> None:
        self._path, self._labels = followed.folder / _STATUS, {"hpc_job": followed.job}

    def figures(self) -> Iterator[Told]:
        try:
            status = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return
        if not isinstance(status, dict):
            return
        for field, name, text, unit in (
            ("steps", "mw_job_step", "The newest step", 1.0),
            ("step_ms", "mw_job_step_seconds", "The middle one of the newest steps", 1e-3),
            ("overhead", "mw_job_watch_overhead_ratio", "What watching takes", 1.0),
        ):
            value = status.get(field)
            if isinstance(value, float | int):
                yield Told(name, text, self._labels, unit * value)
        stalls = status.get("stalls")
        if isinstance(stalls, list):
            yield Told("mw_job_stalls_total", "Times without a step", self._labels,
                       float(len(stalls)), True)  # fmt: skip


class Runs:
    """Several folders, of either kind; one that is empty yet is looked at again each time."""

    def __init__(self, followed: Sequence[Followed]) -> None:
        self._followed = list(followed)
        self._readers: dict[Path, _Run | _Watch] = {}

    def figures(self) -> Iterator[Told]:
        """Give the figures of all."""
        for each in self._followed:
            reader = self._readers.get(each.folder)
            if reader is None:
                if (each.folder / _STATUS).is_file():
                    reader = _Watch(each)
                elif (each.folder / ROWS).is_file():
                    reader = _Run(each)
                else:
                    continue
                self._readers[each.folder] = reader
            yield from reader.figures()
