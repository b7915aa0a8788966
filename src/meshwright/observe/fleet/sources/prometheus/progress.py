"""What jobs were busy with, from what our exporter tells of their steps.

Of each five minutes the part that was spent in steps is told, cut into work and waiting for data;
the rest (start-up, checkpoints, a pause) is not told apart here, and gets no row.
"""

from typing import Final

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.sources.prometheus.answers import Floats
from meshwright.observe.fleet.sources.prometheus.asking import Slice
from meshwright.observe.fleet.sources.prometheus.grid import Grid, mean_of_rows, window
from meshwright.observe.fleet.sources.prometheus.labels import job_of
from meshwright.observe.fleet.sources.source import rows_of
from meshwright.observe.fleet.tables import PROGRESS

STEPPED, WAITED = "mw_job_step_seconds_total", "mw_job_data_wait_seconds_total"
_LENGTH_S: Final = 300.0
_BY = "hpc_job, exported_hpc_job"


def progress(cut: Slice) -> pa.Table:
    """Read what jobs did in a slice of time."""
    step_s = max(_LENGTH_S, cut.grid.step_s)
    first = int(np.floor((cut.grid.start_s - cut.grid.step_s) / step_s)) + 1
    last = int(np.floor(cut.grid.end_s / step_s))
    if STEPPED not in cut.fleet.names or last < first:
        return PROGRESS.empty_table()
    cut = cut._replace(grid=Grid(first * step_s, step_s, last - first + 1))
    jobs: dict[str, int] = {}
    span = cut.fleet.rate_window(step_s)
    stepped = _laid(cut, f"avg by ({_BY}) (rate({cut.fleet.of(STEPPED)}[{span}]))", jobs)
    waited = _laid(cut, f"avg by ({_BY}) (rate({cut.fleet.of(WAITED)}[{span}]))", jobs)
    newest = _newest(cut, "max", "mw_job_step", jobs)
    mfu = _newest(cut, "avg", "mw_job_mfu_ratio", jobs)
    return _table(cut, jobs, stepped, waited[: len(stepped)], (newest, mfu))


def _newest(cut: Slice, how: str, metric: str, jobs: dict[str, int]) -> Floats:
    if metric not in cut.fleet.names:
        return np.full((len(jobs), cut.grid.points), np.nan)
    inner = f"last_over_time({cut.fleet.of(metric)}[{window(cut.grid.step_s)}])"
    return _laid(cut, f"{how} by ({_BY}) ({inner})", jobs)


def _laid(cut: Slice, expression: str, jobs: dict[str, int]) -> Floats:
    named = [(job_of(series.labels), series) for series in cut.ask(expression)]
    found = [(jobs.setdefault(job, len(jobs)), series) for job, series in named if job]
    return mean_of_rows(cut.grid, len(jobs), found)


def _table(
    cut: Slice,
    jobs: dict[str, int],
    stepped: Floats,
    waited: Floats,
    others: tuple[Floats, Floats],
) -> pa.Table:
    row, at = np.nonzero(stepped > 0)
    busy = np.minimum(stepped[row, at], 1.0)
    share = np.clip(np.nan_to_num(waited[row, at]) / stepped[row, at], 0.0, 1.0)
    begins = cut.grid.times()[at] - cut.grid.step_s
    turns = begins + busy * (1 - share) * cut.grid.step_s
    ends = begins + busy * cut.grid.step_s
    newest, mfu = (values[row, at] for values in others)
    worked, waiting = turns > begins, ends > turns
    names = pa.array(list(jobs), pa.string()).take(pa.array(row, pa.int64()))

    def part(some: "np.ndarray[tuple[int], np.dtype[np.bool_]]", phase: str) -> pa.Table:
        count = int(some.sum())
        ours = phase == "productive"
        return rows_of(
            "progress",
            {
                "cluster": pa.repeat(pa.scalar(cut.fleet.cluster), count),
                "job": names.filter(pa.array(some)),
                "attempt": np.zeros(count, dtype=np.int32),
                "start_s": (begins if ours else turns)[some],
                "end_s": (turns if ours else ends)[some],
                "phase": pa.repeat(pa.scalar(phase), count),
                "step": pa.array(newest[some], from_pandas=True).cast(pa.int64()),
                "mfu": mfu[some] if ours else np.full(count, np.nan),
                "seen_s": np.full(count, cut.grid.end_s),
            },
        )

    return pa.concat_tables([part(worked, "productive"), part(waiting, "data_wait")])
