"""What jobs tell of themselves: folders of our trainer's runs, and of `mw watch`.

Figures come from the newest rows; seconds spent in steps and in waiting for data add up, so that a
server takes their rate over whatever time it likes.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.fleet.exporter.metric_sample import MetricSample
from meshwright.observe.twin.drift.run_steps import METRICS_FILE, MetricsTail
from meshwright.observe.watch.watch_status import WatchStatus, read_status

_STATUS = "status.json"


class JobFolder(NamedTuple):
    """A folder, and the job that writes there."""

    folder: Path
    job: str

    @classmethod
    def parse(cls, text: str) -> "JobFolder":
        """Read `FOLDER` or `FOLDER=JOB`; without a job the folder's name is its own."""
        path, _, job = text.partition("=")
        folder = Path(path)
        if not folder.is_dir():
            fix = "name the folder of a run of mw train or of mw watch"
            raise InputError([Problem(path, "is no folder", fix)])
        return cls(folder, job or folder.resolve().name)


class _Run:
    """The rows of a run, added up as they come."""

    def __init__(self, followed: JobFolder) -> None:
        self._rows, self._labels = (
            MetricsTail(followed.folder / METRICS_FILE),
            {"hpc_job": followed.job},
        )
        self._step, self._step_s, self._wait_s = 0, 0.0, 0.0
        self._newest: dict[str, Any] = {}

    def figures(self) -> Iterator[MetricSample]:
        for row in self._rows.read_new_rows():
            # A row may stand for the steps since the one before, which took about as long.
            took_s = max(1, row["step"] - self._step) * float(row["step_s"])
            if not self._newest:
                took_s = float(row["step_s"])
            self._step_s += took_s
            self._wait_s += took_s * float(row.get("data_wait_fraction") or 0.0)
            self._step, self._newest = row["step"], row
        if not self._newest:
            return
        yield MetricSample("mw_job_step", "The newest step", self._labels, self._step)
        yield MetricSample(
            "mw_job_step_seconds_total", "Time in steps", self._labels, self._step_s, True
        )
        yield MetricSample("mw_job_data_wait_seconds_total", "Time in steps that waited for data",
                   self._labels, self._wait_s, True)  # fmt: skip
        for field, name, text in (
            ("step_s", "mw_job_step_seconds", "What the newest step took"),
            ("data_wait_fraction", "mw_job_data_wait_ratio", "Its share of waiting for data"),
            ("tokens_per_s", "mw_job_tokens_per_second", "Tokens a second in it"),
            ("mfu", "mw_job_mfu_ratio", "Its share of the device's peak"),
        ):
            value = self._newest.get(field)
            if isinstance(value, float | int):
                yield MetricSample(name, text, self._labels, float(value))


class _Watch:
    """The status that `mw watch` keeps beside a job of any making."""

    def __init__(self, followed: JobFolder) -> None:
        self._path, self._labels = followed.folder / _STATUS, {"hpc_job": followed.job}
        self._has_warned = False

    def figures(self) -> Iterator[MetricSample]:
        status = self._read()
        if status is None:
            return
        for value, name, text, unit in (
            (status.steps, "mw_job_step", "The newest step", 1.0),
            (status.step_ms, "mw_job_step_seconds", "The middle one of the newest steps", 1e-3),
            (status.overhead_share, "mw_job_watch_overhead_ratio", "What watching takes", 1.0),
        ):
            if value is not None:
                yield MetricSample(name, text, self._labels, unit * value)
        yield MetricSample(
            "mw_job_hangs_total", "Times without a step", self._labels, len(status.hangs), True
        )

    def _read(self) -> WatchStatus | None:
        """Read the status; warn once of one that this version does not read."""
        try:
            return read_status(self._path)
        except InputError as error:
            if not self._has_warned:
                warnings.warn(str(error), stacklevel=2)
                self._has_warned = True
            return None


class JobMetricReader:
    """Several folders, of either kind; one that is empty yet is looked at again each time."""

    def __init__(self, followed: Sequence[JobFolder]) -> None:
        self._followed = list(followed)
        self._readers: dict[Path, _Run | _Watch] = {}

    def read_metrics(self) -> Iterator[MetricSample]:
        """Give the figures of all."""
        for each in self._followed:
            reader = self._readers.get(each.folder)
            if reader is None:
                if (each.folder / _STATUS).is_file():
                    reader = _Watch(each)
                elif (each.folder / METRICS_FILE).is_file():
                    reader = _Run(each)
                else:
                    continue
                self._readers[each.folder] = reader
            yield from reader.figures()
