"""What jobs were busy with, from what our exporter tells of their steps.

Of each five minutes the part that was spent in steps is told, cut into work and waiting for data;
the rest (start-up, checkpoints, a pause) is not told apart here, and gets no row.
"""

from typing import Final

import numpy as np
import pyarrow as pa

from meshwright.fleet.sources.prometheus.labels import parse_job
from meshwright.fleet.sources.prometheus.query import QueryWindow
from meshwright.fleet.sources.prometheus.response import Floats
from meshwright.fleet.sources.prometheus.time_grid import (
    TimeGrid,
    average_rows,
    format_promql_range,
)
from meshwright.fleet.sources.source import make_rows
from meshwright.fleet.tables import PROGRESS

STEP_SECONDS_METRIC, DATA_WAIT_METRIC = (
    "mw_job_step_seconds_total",
    "mw_job_data_wait_seconds_total",
)
_LENGTH_S: Final = 300.0
_BY = "hpc_job, exported_hpc_job"


def read_progress(cut: QueryWindow) -> pa.Table:
    """Read what jobs did in a slice of time."""
    step_s = max(_LENGTH_S, cut.grid.step_s)
    first = int(np.floor((cut.grid.start_s - cut.grid.step_s) / step_s)) + 1
    last = int(np.floor(cut.grid.end_s / step_s))
    if STEP_SECONDS_METRIC not in cut.scope.metric_names or last < first:
        return PROGRESS.empty_table()
    cut = cut._replace(grid=TimeGrid(first * step_s, step_s, last - first + 1))
    jobs: dict[str, int] = {}
    span = cut.scope.format_rate_window(step_s)
    stepped = _laid(
        cut, f"avg by ({_BY}) (rate({cut.scope.build_selector(STEP_SECONDS_METRIC)}[{span}]))", jobs
    )
    waited = _laid(
        cut, f"avg by ({_BY}) (rate({cut.scope.build_selector(DATA_WAIT_METRIC)}[{span}]))", jobs
    )
    newest = _newest(cut, "max", "mw_job_step", jobs)
    mfu = _newest(cut, "avg", "mw_job_mfu_ratio", jobs)
    return _table(cut, jobs, stepped, waited[: len(stepped)], (newest, mfu))


def _newest(cut: QueryWindow, how: str, metric: str, jobs: dict[str, int]) -> Floats:
    if metric not in cut.scope.metric_names:
        return np.full((len(jobs), cut.grid.num_points), np.nan)
    selector = cut.scope.build_selector(metric)
    inner = f"last_over_time({selector}[{format_promql_range(cut.grid.step_s)}])"
    return _laid(cut, f"{how} by ({_BY}) ({inner})", jobs)


def _laid(cut: QueryWindow, expression: str, jobs: dict[str, int]) -> Floats:
    named = [(parse_job(series.labels), series) for series in cut.query_range(expression)]
    found = [(jobs.setdefault(job, len(jobs)), series) for job, series in named if job]
    return average_rows(cut.grid, len(jobs), found)


def _table(
    cut: QueryWindow,
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
        return make_rows(
            "progress",
            {
                "cluster": pa.repeat(pa.scalar(cut.scope.cluster), count),
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
