"""Jobs of one name that two files tell differently: two jobs, of which the store could keep one."""

from typing import Any, NamedTuple

import pyarrow as pa

from meshwright.fleet.store.query import run_query

_SHOWN = 3
_ROUNDING_S = 1.0


class JobConflicts(NamedTuple):
    """Jobs whose times differ from those of a job with the same name."""

    num_jobs: int
    examples: tuple[str, ...]
    """The names of the first of them."""


def find_job_conflicts(link: Any, rows: pa.Table, known: str) -> JobConflicts:
    """Return the jobs of some rows that differ from `known` (in SQL), or from one another.

    A job that was told before may start, end and change its state. When it was handed in, and times
    that both versions know, do not change: where they do, these are two jobs.
    """
    link.register("incoming", rows)
    try:
        found = run_query(link, _sql(known))
    finally:
        link.unregister("incoming")
    return JobConflicts(found.num_rows, tuple(found["job"].to_pylist()[:_SHOWN]))


def _sql(known: str) -> str:
    differ = " OR ".join(
        f"abs(n.{name} - o.{name}) > {_ROUNDING_S}" for name in ("submit_s", "start_s", "end_s")
    )
    spread = " OR ".join(
        f"max({name}) - min({name}) > {_ROUNDING_S}" for name in ("submit_s", "start_s", "end_s")
    )
    return f"""
        SELECT DISTINCT job FROM (
            SELECT n.job FROM incoming n JOIN ({known}) o
            ON n.cluster = o.cluster AND n.job = o.job AND n.attempt = o.attempt
            WHERE {differ}
            UNION ALL
            SELECT job FROM incoming GROUP BY cluster, job, attempt HAVING {spread}
        ) ORDER BY length(job), job
    """
