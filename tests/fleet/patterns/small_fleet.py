"""A fleet of one node and a few jobs, written down by hand."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from meshwright.fleet.patterns import FleetData, build_fleet_data
from meshwright.fleet.tables import TABLE_SCHEMAS

BEGIN_S = 1_790_000_000.0
STEP_S = 60.0
GIB = 2.0**30


def rows(table: str, *given: Mapping[str, Any]) -> pa.Table:
    """Rows of a table; what is not given is null."""
    return pa.Table.from_pylist(
        [{"cluster": "c", **row} for row in given], schema=TABLE_SCHEMAS[table]
    )


def job(number: str = "1", hours: float = 5, gpus: int = 1, **given: Any) -> dict[str, Any]:
    """One attempt from the beginning on."""
    start = BEGIN_S + 3600 * float(given.pop("after", 0))
    return {
        "job": number, "attempt": 0, "user": "ada", "name": "train", "state": "completed",
        "submit_s": start, "start_s": start, "end_s": start + 3600 * hours, "gpus": gpus,
        "nodes": ["n1"], "gpu_kind": "h100", **given,
    }  # fmt: skip


def held(one: Mapping[str, Any], *gpus: int, node: str = "n1", share: float = 1.0) -> list[Any]:
    """That a job had these GPUs."""
    return [
        {"job": one["job"], "attempt": one["attempt"], "node": node, "gpu": gpu,
         "start_s": one["start_s"], "end_s": one["end_s"], "gpu_fraction": share}
        for gpu in gpus
    ]  # fmt: skip


def samples(hours: float, gpu: int = 0, node: str = "n1", /, **levels: Any) -> pa.Table:
    """Samples each minute; a level is a number, or an array with one for each."""
    count = int(hours * 3600 / STEP_S)
    columns: dict[str, Any] = {}
    for field in TABLE_SCHEMAS["gpu_samples"]:
        if field.name in levels:
            value = np.broadcast_to(np.asarray(levels[field.name], dtype=np.float64), (count,))
            columns[field.name] = pa.array(value, field.type, from_pandas=True)
        else:
            columns[field.name] = pa.nulls(count, field.type)
    columns["cluster"], columns["node"] = pa.array(["c"] * count), pa.array([node] * count)
    columns["gpu"] = pa.array([gpu] * count, pa.int32())
    columns["time_s"] = pa.array(BEGIN_S + STEP_S * np.arange(count))
    return pa.table(columns, schema=TABLE_SCHEMAS["gpu_samples"])


def fleet(hours: float = 24, **tables: pa.Table) -> FleetData:
    """What detectors see."""
    return build_fleet_data(tables, since_s=BEGIN_S, until_s=BEGIN_S + 3600 * hours)
