"""Times, signs and order of jobs: checks that hold for jobs of every source."""

from typing import Final, NamedTuple

import numpy as np

from meshwright.fleet.columns import Flags, Floats
from meshwright.fleet.store.schema_check import MAX_TIME_S

MAX_GPUS: Final = 1e6
"""No job has more: the largest known cluster has a few hundred thousand."""
MAX_RUN_S: Final = 10 * 365 * 86_400.0
"""No job runs longer than ten years: longer ones are in another unit."""
_EARLIEST_S: Final = -MAX_TIME_S
_ROUNDING_S: Final = 1.5
"""Starts and ends are rounded to seconds, each by itself."""
CLOCK_SKEW_S: Final = 60.0
"""Two machines with different clocks may record submission and start."""


class JobFault(NamedTuple):
    """Jobs with an impossible value, and the reason."""

    column: str
    """Which of the columns of `jobs` is wrong."""
    rows: Flags
    what: str
    fix: str


def _far_from_the_others(times: Floats) -> Flags:
    """Return which times lie further from the median than any list of jobs is long."""
    if np.isnan(times).all():
        return np.zeros(len(times), dtype=np.bool_)
    return np.abs(times - np.nanmedian(times)) > MAX_RUN_S


def find_job_faults(
    submit_s: Floats, start_s: Floats, end_s: Floats, gpus: Floats, *, skew_s: float = CLOCK_SKEW_S
) -> list[JobFault]:
    """Return what is wrong with jobs; NaN is unknown and never wrong.

    A job may start `skew_s` before it was handed in, by another clock.
    """
    found = []
    with np.errstate(invalid="ignore"):
        for name, times in (("submit_s", submit_s), ("start_s", start_s), ("end_s", end_s)):
            strange = (times > MAX_TIME_S) | (times < _EARLIEST_S) | np.isinf(times)
            found.append(
                JobFault(
                    name, strange, "is no time in seconds since 1970",
                    "divide milliseconds by 1000, microseconds by 1e6",
                )
            )  # fmt: skip
        known = ~np.logical_or.reduce([one.rows for one in found])
        found += [
            JobFault(
                "end_s", known & (end_s < start_s - _ROUNDING_S), "lies before the start",
                "swap them, or mend the one that is wrong",
            ),
            JobFault(
                "end_s", known & np.isnan(start_s) & (end_s < submit_s - skew_s),
                "lies before the submission", "mend the one that is wrong",
            ),
            JobFault(
                "start_s", known & (start_s < submit_s - skew_s), "lies before the submission",
                "swap them, or mend the one that is wrong",
            ),
            JobFault(
                "end_s", known & (end_s - start_s > MAX_RUN_S), "makes a run of over ten years",
                "write both in seconds, or correct the year",
            ),
            JobFault(
                "submit_s", known & _far_from_the_others(submit_s),
                "lies over ten years from the other jobs", "write all in one unit and one era",
            ),
            JobFault("gpus", gpus < 0, "is less than no GPUs", "write the GPUs it had"),
            JobFault(
                "gpus", (gpus > MAX_GPUS) | np.isinf(gpus), "is more GPUs than any cluster has",
                "write the GPUs it had",
            ),
        ]  # fmt: skip
    return [one for one in found if one.rows.any()]
