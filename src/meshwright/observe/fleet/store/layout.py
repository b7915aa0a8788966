"""Which tables the store has, how they are cut into files, and what time a row is of."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import pyarrow as pa

from meshwright.observe.fleet.tables import KEYS, METRICS, NODE_METRICS, TABLES

WINDOW_S: Final = 300
"""Samples are rolled up over this long as they arrive."""
HOUR_S: Final = 3600
DAY_S: Final = 86_400

BUCKETS: Final = {"samples": HOUR_S, "node_samples": DAY_S, "events": DAY_S}
"""Tables of moments, and the stretch of time of which rows lie in files of their own."""

MASKS: Final = frozenset({"throttle"})
"""Metrics that are bits: of these a window keeps which were set in any sample, and no mean."""


class Rollup(NamedTuple):
    """Samples rolled up over five minutes, and over an hour once those have been let go."""

    windows: str
    hours: str
    metrics: tuple[str, ...]


ROLLUPS: Final = {
    "samples": Rollup("windows", "hours", tuple(METRICS)),
    "node_samples": Rollup("node_windows", "node_hours", tuple(NODE_METRICS)),
}


def rolled_schema(table: str) -> pa.Schema:
    """Return the columns of a roll-up of a table of samples.

    For each metric: the mean and the largest of the samples that have it, the share of these that
    are exactly 0, and how many they are. `count` is how many samples there were at all.
    """
    schema, rollup = TABLES[table], ROLLUPS[table]
    keys = [schema.field(name) for name in KEYS[table]]
    columns: list[tuple[str, pa.DataType]] = [("count", pa.int32())]
    for metric in rollup.metrics:
        kind = schema.field(metric).type
        if metric in MASKS:
            columns.append((f"{metric}_any", pa.int64()))
        else:
            columns += [(f"{metric}_mean", kind), (f"{metric}_max", kind)]
        columns += [(f"{metric}_zero", pa.float32()), (f"{metric}_count", pa.int32())]
    return pa.schema([*keys, *columns])


SCHEMAS: Final[Mapping[str, pa.Schema]] = {
    **TABLES,
    **{
        name: rolled_schema(table)
        for table, rollup in ROLLUPS.items()
        for name in (rollup.windows, rollup.hours)
    },
}
"""Columns of every table that can be read."""

SPANS: Final = {
    "jobs": ("submit_s", "end_s"),
    "held": ("start_s", "end_s"),
    "nodes": ("since_s", "until_s"),
    "gpus": ("since_s", "until_s"),
    "progress": ("start_s", "end_s"),
}
"""From when to when a row of a table without moments holds; null is without bound."""

SPAN_OF_ROLLUP: Final = {
    name: span
    for rollup in ROLLUPS.values()
    for name, span in ((rollup.windows, WINDOW_S), (rollup.hours, HOUR_S))
}
"""How long the windows of a roll-up are."""


def within(table: str, since_s: float | None, until_s: float | None) -> list[str]:
    """Return the SQL conditions under which a row is of the time from `since_s` to `until_s`.

    What lasts is of this time where any part of it is; a window where its start is.
    """
    first, last = SPANS.get(table, ("time_s", "time_s"))
    found = []
    if since_s is not None and since_s > float("-inf"):
        late = f"{last} {'>=' if first == last else '>'} {float(since_s)!r}"
        found.append(late if first == last else f"({last} IS NULL OR {late})")
    if until_s is not None and until_s < float("inf"):
        early = f"{first} < {float(until_s)!r}"
        found.append(early if first == last else f"({first} IS NULL OR {early})")
    return found
