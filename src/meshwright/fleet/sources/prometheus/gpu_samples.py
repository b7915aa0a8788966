"""Samples of GPUs: each metric of each slice of time is one question, rolled up by the server."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.sources.prometheus.labels import (
    GPU_LABELS,
    parse_gpu,
    parse_mig_fraction,
    parse_mig_instance,
    parse_node,
)
from meshwright.fleet.sources.prometheus.metric_names import (
    METRIC_FIELDS,
    THROTTLE_COUNTERS,
    UNUSED_MEMORY_FIELDS,
    MetricField,
    MetricName,
    convert_unit,
    mask_blanks,
)
from meshwright.fleet.sources.prometheus.query import PrometheusScope, QueryWindow
from meshwright.fleet.sources.prometheus.response import TimeSeries
from meshwright.fleet.sources.prometheus.time_grid import (
    Floats,
    TimeGrid,
    average_rows,
    format_promql_range,
    pad_rows,
)
from meshwright.fleet.sources.source import make_rows

_BY = ", ".join(GPU_LABELS)


class _Piece(NamedTuple):
    row: int
    instance: str
    part: float
    series: TimeSeries


class _Rows:
    """Rows of a grid by node and GPU, numbered as they come."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, int], int] = {}
        self.notes: set[str] = set()
        self.rates: set[str] = set()

    def number(self, node: str, gpu: int) -> int:
        return self.keys.setdefault((node, gpu), len(self.keys))


def has_gpu_metrics(names: frozenset[str]) -> bool:
    """Tell whether a server has anything of GPUs."""
    return any(name.name in names for field in METRIC_FIELDS for name in field.names)


def read_gpu_samples(cut: QueryWindow) -> tuple[pa.Table, tuple[str, ...]]:
    """Read the samples of a slice of time, with what there is to say of them."""
    rows = _Rows()
    columns = {field.column: _column(cut, field, rows) for field in METRIC_FIELDS}
    if columns["memory_total"] is None and columns["memory_used"] is not None:
        columns["memory_total"] = _whole_memory(cut, rows, columns["memory_used"])
    if columns["throttle"] is None:
        columns["throttle"] = _throttled(cut, rows)
    known = {
        name: pad_rows(values, len(rows.keys))
        for name, values in columns.items()
        if values is not None
    }
    return _table(cut, rows, known), tuple(rows.notes)


def build_query(fleet: PrometheusScope, field: MetricField, name: MetricName, step_s: float) -> str:
    """Return what is asked for a column under one of its names."""
    metric = fleet.build_selector(name.name)
    if name.is_counter:
        inner = f"rate({metric}[{fleet.format_rate_window(step_s)}])"
    else:
        inner = f"{field.time_aggregation}_over_time({metric}[{format_promql_range(step_s)}])"
    # Labels of pods and jobs would make a new series of each; replicas would count twice.
    return f"max by ({_BY}) ({inner})"


def _column(cut: QueryWindow, field: MetricField, rows: _Rows) -> Floats | None:
    found: Floats | None = None
    names = [name for name in field.names if name.name in cut.scope.metric_names]
    if all(name.is_counter for name in names):
        rows.rates.add(field.column)
    for name in names:
        values = _laid(cut.grid, _pieces(cut, field, name, rows), field, rows)
        found = values if found is None else _either(pad_rows(found, len(values)), values)
    return found


def _pieces(cut: QueryWindow, field: MetricField, name: MetricName, rows: _Rows) -> list[_Piece]:
    found, unnamed = list[tuple[str, int, TimeSeries]](), 0
    for series in cut.query_range(build_query(cut.scope, field, name, cut.grid.step_s)):
        node, gpu = parse_node(series.labels, cut.scope.node_naming), parse_gpu(series.labels)
        if node and gpu is not None:
            found.append((node, gpu, series))
        else:
            unnamed += 1
    if unnamed:
        rows.notes.add(f"{unnamed} series of {name.name} name no node or GPU and were left out")
    scale = _scales(found, _with_fractions(cut, name)) if name.scale is None else {}
    return [
        _Piece(
            rows.number(node, gpu),
            parse_mig_instance(series.labels),
            parse_mig_fraction(series.labels),
            series._replace(values=convert_unit(series.values * scale.get(node, 1.0), name, field)),
        )
        for node, gpu, series in found
    ]


def _scales(
    found: Sequence[tuple[str, int, TimeSeries]], fractions: frozenset[str]
) -> dict[str, float]:
    """Tell percentages from shares: by node, since one node has one exporter.

    A value above one is a percentage, and whole percents have no fraction before they are averaged.
    A node that shows neither goes by the rest of the fleet.
    """
    most: dict[str, float] = {}
    for node, _, series in found:
        known = mask_blanks(series.values)
        top = float(np.nanmax(known)) if (~np.isnan(known)).any() else 0.0
        most[node] = max(most.get(node, 0.0), top)
    percent = any(top > 1.0 for top in most.values())
    return {
        node: 0.01 if top > 1.0 or (percent and node not in fractions) else 1.0
        for node, top in most.items()
    }


def _with_fractions(cut: QueryWindow, name: MetricName) -> frozenset[str]:
    """Ask on which nodes single samples were no whole numbers in the last hour of a slice."""
    metric, fleet = cut.scope.build_selector(name.name), cut.scope
    span_s = min(3600.0, cut.grid.num_points * cut.grid.step_s)
    inside = (
        f"({metric} - floor({metric}))[{round(span_s)}s:{max(1, round(fleet.scrape_interval_s))}s]"
    )
    found = cut.query_instant(f"max by ({_BY}) (max_over_time({inside})) > 0")
    return frozenset(parse_node(each.labels, fleet.node_naming) for each in found)


def _laid(grid: TimeGrid, pieces: Sequence[_Piece], field: MetricField, rows: _Rows) -> Floats:
    count = len(rows.keys)
    whole = average_rows(grid, count, [(one.row, one.series) for one in pieces if not one.instance])
    parts = [one for one in pieces if one.instance]
    if not parts:
        return whole
    cells: dict[tuple[int, str], int] = {}
    numbers = [cells.setdefault((one.row, one.instance), len(cells)) for one in parts]
    each = average_rows(
        grid, len(cells), [(at, one.series) for at, one in zip(numbers, parts, strict=True)]
    )
    share = np.ones(len(cells))
    share[numbers] = [one.part for one in parts]
    of = np.array([row for row, _ in cells])
    some = np.zeros((count, grid.num_points), dtype=bool)
    np.logical_or.at(some, of, ~np.isnan(each))
    if field.mig_aggregation == "same":
        joined = np.full((count, grid.num_points), -np.inf)
        np.maximum.at(joined, of, np.nan_to_num(each, nan=-np.inf))
    else:
        joined = np.zeros((count, grid.num_points))
        weight = share[:, None] if field.mig_aggregation == "share" else 1.0
        np.add.at(joined, of, np.nan_to_num(each) * weight)
    return _either(whole, np.where(some, joined, np.nan))


def _whole_memory(cut: QueryWindow, rows: _Rows, used: Floats) -> Floats | None:
    free, reserved = (_column(cut, field, rows) for field in UNUSED_MEMORY_FIELDS)
    if free is None:
        return None
    total = pad_rows(used, len(free)) + free
    return total if reserved is None else total + np.nan_to_num(pad_rows(reserved, len(total)))


def _throttled(cut: QueryWindow, rows: _Rows) -> Floats | None:
    """Make bits of reasons from counters of the time for which clocks were held back."""
    bits: Floats | None = None
    for bit, names in THROTTLE_COUNTERS.items():
        field = MetricField(
            "throttle", tuple(MetricName(each, is_counter=True) for each in names), 1e12
        )
        grows = _column(cut, field, rows)
        if grows is not None:
            own = np.where(np.isnan(grows), np.nan, np.where(grows > 0, float(bit), 0.0))
            before = np.zeros((0, cut.grid.num_points)) if bits is None else bits
            before = pad_rows(before, len(own))
            some = ~(np.isnan(before) & np.isnan(own))
            bits = np.where(some, np.nan_to_num(before) + np.nan_to_num(own), np.nan)
    return bits


def _either(first: Floats, other: Floats) -> Floats:
    return np.where(np.isnan(first), other, first)


def _table(cut: QueryWindow, rows: _Rows, columns: Mapping[str, Floats]) -> pa.Table:
    keys = rows.keys
    some = np.zeros((len(keys), cut.grid.num_points), dtype=bool)
    # A rate is made of samples further back, and is no sign that there was one in this step.
    measured = [values for name, values in columns.items() if name not in rows.rates]
    for values in measured or columns.values():
        some |= ~np.isnan(values)
    # In the order of time, as whoever keeps them wants it.
    at, row = np.nonzero(some.T)
    nodes = pa.array([node for node, _ in keys], pa.string())
    gpus = np.array([gpu for _, gpu in keys], dtype=np.int32)
    return make_rows(
        "gpu_samples",
        {
            "cluster": pa.repeat(pa.scalar(cut.scope.cluster), len(row)),
            "node": nodes.take(pa.array(row, pa.int64())),
            "gpu": gpus[row],
            "time_s": cut.grid.times()[at],
            **{name: values[row, at] for name, values in columns.items()},
        },
    )
