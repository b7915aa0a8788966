"""Rows of the fleet's tables from a few words, for tests."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from meshwright.fleet.tables import ALLOCATIONS, JOBS, NODES, PROGRESS

HOUR = 3600.0
DAY = 24 * HOUR


def _table(rows: Sequence[dict[str, Any]], schema: pa.Schema, defaults: dict[str, Any]) -> pa.Table:
    whole = [{**defaults, **row} for row in rows]
    return pa.Table.from_pylist(
        [{name: row.get(name) for name in schema.names} for row in whole], schema=schema
    )


def jobs(*rows: dict[str, Any]) -> pa.Table:
    """Jobs of the cluster `c`, completed unless they say otherwise."""
    return _table(
        rows, JOBS, {"cluster": "c", "attempt": 0, "state": "completed", "partition": "gpu"}
    )


def nodes(*rows: dict[str, Any]) -> pa.Table:
    """Nodes of 8 GPUs that are up from the beginning."""
    return _table(
        rows, NODES,
        {"cluster": "c", "since_s": 0.0, "state": "up", "gpus": 8, "partitions": ["gpu"]},
    )  # fmt: skip


def held(*rows: dict[str, Any]) -> pa.Table:
    """GPUs held whole."""
    return _table(rows, ALLOCATIONS, {"cluster": "c", "attempt": 0, "gpu_fraction": 1.0})


def progress(*rows: tuple[str, float, float, str]) -> pa.Table:
    """What jobs tell: job, start, end, phase."""
    told = [
        {"job": job, "start_s": start, "end_s": end, "phase": phase}
        for job, start, end, phase in rows
    ]
    return _table(told, PROGRESS, {"cluster": "c", "attempt": 0})


def rollups(*rows: tuple[str, int, float, float]) -> pa.Table:
    """Five minutes of a GPU: node, index, beginning, activity."""
    return pa.table(
        {
            "cluster": pa.array(["c"] * len(rows), pa.string()),
            "node": pa.array([row[0] for row in rows], pa.string()),
            "gpu": pa.array([row[1] for row in rows], pa.int32()),
            "time_s": pa.array([row[2] for row in rows], pa.float64()),
            "gpu_util_mean": pa.array([row[3] for row in rows], pa.float32()),
            "tensor_active_mean": pa.array([row[3] / 2 for row in rows], pa.float32()),
        }
    )
