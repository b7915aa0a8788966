"""Which tables the store has, how they are cut into files, and what time a row is of."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import pyarrow as pa

from meshwright.fleet.tables import GPU_METRICS, NODE_METRICS, PRIMARY_KEYS, TABLE_SCHEMAS

WINDOW_S: Final = 300
"""Samples are rolled up over this long as they arrive."""
HOUR_S: Final = 3600
DAY_S: Final = 86_400

BUCKET_LENGTHS_S: Final = {"gpu_samples": HOUR_S, "node_samples": DAY_S, "events": DAY_S}
"""Tables of moments, and the stretch of time of which rows lie in files of their own."""

BITMASK_METRICS: Final = frozenset({"throttle"})
"""Metrics that are bits: of these a window keeps which were set in any sample, and no mean."""


class Rollup(NamedTuple):
    """Samples rolled up over five minutes, and over an hour once those have been let go."""

    table_5m: str
    table_1h: str
    metrics: tuple[str, ...]


ROLLUPS: Final = {
    "gpu_samples": Rollup("gpu_rollups_5m", "gpu_rollups_1h", tuple(GPU_METRICS)),
    "node_samples": Rollup("node_rollups_5m", "node_rollups_1h", tuple(NODE_METRICS)),
}


def build_rollup_schema(table: str) -> pa.Schema:
    """Return the columns of a roll-up of a table of samples.

    For each metric: the mean and the largest of the samples that have it, the share of these that
    are exactly 0, and how many they are. `count` is how many samples there were at all.
    """
    schema, rollup = TABLE_SCHEMAS[table], ROLLUPS[table]
    keys = [schema.field(name) for name in PRIMARY_KEYS[table]]
    columns: list[tuple[str, pa.DataType]] = [("count", pa.int32())]
    for metric in rollup.metrics:
        kind = schema.field(metric).type
        if metric in BITMASK_METRICS:
            columns.append((f"{metric}_any", pa.int64()))
        else:
            columns += [(f"{metric}_mean", kind), (f"{metric}_max", kind)]
        columns += [(f"{metric}_zero", pa.float32()), (f"{metric}_count", pa.int32())]
    return pa.schema([*keys, *columns])


SCHEMAS: Final[Mapping[str, pa.Schema]] = {
    **TABLE_SCHEMAS,
    **{
        name: build_rollup_schema(table)
        for table, rollup in ROLLUPS.items()
        for name in (rollup.table_5m, rollup.table_1h)
    },
}
"""Columns of every table that can be read."""

SPAN_COLUMNS: Final = {
    "jobs": ("submit_s", "end_s"),
    "allocations": ("start_s", "end_s"),
    "nodes": ("since_s", "until_s"),
    "gpus": ("since_s", "until_s"),
    "progress": ("start_s", "end_s"),
}
"""From when to when a row of a table without moments holds; null is without bound."""

ROLLUP_LENGTHS_S: Final = {
    name: span
    for rollup in ROLLUPS.values()
    for name, span in ((rollup.table_5m, WINDOW_S), (rollup.table_1h, HOUR_S))
}
"""How long the windows of a roll-up are."""


def build_time_conditions(table: str, since_s: float | None, until_s: float | None) -> list[str]:
    """Return the SQL conditions under which a row is of the time from `since_s` to `until_s`.

    What lasts is of this time where any part of it is; a window where its start is.
    """
    first, last = SPAN_COLUMNS.get(table, ("time_s", "time_s"))
    found = []
    if since_s is not None and since_s > float("-inf"):
        late = f"{last} {'>=' if first == last else '>'} {float(since_s)!r}"
        found.append(late if first == last else f"({last} IS NULL OR {late})")
    if until_s is not None and until_s < float("inf"):
        early = f"{first} < {float(until_s)!r}"
        found.append(early if first == last else f"({first} IS NULL OR {early})")
    return found
