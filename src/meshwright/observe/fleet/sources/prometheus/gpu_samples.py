"""Samples of GPUs: each metric of each slice of time is one question, rolled up by the server."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.sources.prometheus.answers import Series
from meshwright.observe.fleet.sources.prometheus.asking import Fleet, Slice
from meshwright.observe.fleet.sources.prometheus.grid import (
    Floats,
    Grid,
    mean_of_rows,
    padded,
    window,
)
from meshwright.observe.fleet.sources.prometheus.labels import (
    GPU_LABELS,
    gpu_of,
    instance_of,
    node_of,
    part_of,
)
from meshwright.observe.fleet.sources.prometheus.names import (
    FIELDS,
    REST_OF_MEMORY,
    THROTTLED,
    Field,
    Name,
    in_unit,
    without_blanks,
)
from meshwright.observe.fleet.sources.source import rows_of

_BY = ", ".join(GPU_LABELS)


class _Piece(NamedTuple):
    row: int
    instance: str
    part: float
    series: Series


class _Rows:
    """Rows of a grid by node and GPU, numbered as they come."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, int], int] = {}
        self.notes: set[str] = set()
        self.rates: set[str] = set()

    def number(self, node: str, gpu: int) -> int:
        return self.keys.setdefault((node, gpu), len(self.keys))


def has_gpus(names: frozenset[str]) -> bool:
    """Tell whether a server has anything of GPUs."""
    return any(name.text in names for field in FIELDS for name in field.names)


def gpu_samples(cut: Slice) -> tuple[pa.Table, tuple[str, ...]]:
    """Read the samples of a slice of time, with what there is to say of them."""
    rows = _Rows()
    columns = {field.column: _column(cut, field, rows) for field in FIELDS}
    if columns["memory_total"] is None and columns["memory_used"] is not None:
        columns["memory_total"] = _whole_memory(cut, rows, columns["memory_used"])
    if columns["throttle"] is None:
        columns["throttle"] = _throttled(cut, rows)
    known = {
        name: padded(values, len(rows.keys))
        for name, values in columns.items()
        if values is not None
    }
    return _table(cut, rows, known), tuple(rows.notes)


def question(fleet: Fleet, field: Field, name: Name, step_s: float) -> str:
    """Return what is asked for a column under one of its names."""
    metric = fleet.of(name.text)
    if name.counter:
        inner = f"rate({metric}[{fleet.rate_window(step_s)}])"
    else:
        inner = f"{field.over}_over_time({metric}[{window(step_s)}])"
    # Labels of pods and jobs would make a new series of each; replicas would count twice.
    return f"max by ({_BY}) ({inner})"


def _column(cut: Slice, field: Field, rows: _Rows) -> Floats | None:
    found: Floats | None = None
    names = [name for name in field.names if name.text in cut.fleet.names]
    if all(name.counter for name in names):
        rows.rates.add(field.column)
    for name in names:
        values = _laid(cut.grid, _pieces(cut, field, name, rows), field, rows)
        found = values if found is None else _either(padded(found, len(values)), values)
    return found


def _pieces(cut: Slice, field: Field, name: Name, rows: _Rows) -> list[_Piece]:
    found, unnamed = list[tuple[str, int, Series]](), 0
    for series in cut.ask(question(cut.fleet, field, name, cut.grid.step_s)):
        node, gpu = node_of(series.labels, cut.fleet.naming), gpu_of(series.labels)
        if node and gpu is not None:
            found.append((node, gpu, series))
        else:
            unnamed += 1
    if unnamed:
        rows.notes.add(f"{unnamed} series of {name.text} name no node or GPU and were left out")
    scale = _scales(found, _with_fractions(cut, name)) if name.scale is None else {}
    return [
        _Piece(
            rows.number(node, gpu),
            instance_of(series.labels),
            part_of(series.labels),
            series._replace(values=in_unit(series.values * scale.get(node, 1.0), name, field)),
        )
        for node, gpu, series in found
    ]


def _scales(
    found: Sequence[tuple[str, int, Series]], fractions: frozenset[str]
) -> dict[str, float]:
    """Tell percentages from shares: by node, since one node has one exporter.

    A value above one is a percentage, and whole percents have no fraction before they are averaged.
    A node that shows neither goes by the rest of the fleet.
    """
    most: dict[str, float] = {}
    for node, _, series in found:
        known = without_blanks(series.values)
        top = float(np.nanmax(known)) if (~np.isnan(known)).any() else 0.0
        most[node] = max(most.get(node, 0.0), top)
    percent = any(top > 1.0 for top in most.values())
    return {
        node: 0.01 if top > 1.0 or (percent and node not in fractions) else 1.0
        for node, top in most.items()
    }


def _with_fractions(cut: Slice, name: Name) -> frozenset[str]:
    """Ask on which nodes single samples were no whole numbers in the last hour of a slice."""
    metric, fleet = cut.fleet.of(name.text), cut.fleet
    span_s = min(3600.0, cut.grid.points * cut.grid.step_s)
    inside = f"({metric} - floor({metric}))[{round(span_s)}s:{max(1, round(fleet.scrape_s))}s]"
    found = cut.ask_at_end(f"max by ({_BY}) (max_over_time({inside})) > 0")
    return frozenset(node_of(each.labels, fleet.naming) for each in found)


def _laid(grid: Grid, pieces: Sequence[_Piece], field: Field, rows: _Rows) -> Floats:
    count = len(rows.keys)
    whole = mean_of_rows(grid, count, [(one.row, one.series) for one in pieces if not one.instance])
    parts = [one for one in pieces if one.instance]
    if not parts:
        return whole
    cells: dict[tuple[int, str], int] = {}
    numbers = [cells.setdefault((one.row, one.instance), len(cells)) for one in parts]
    each = mean_of_rows(
        grid, len(cells), [(at, one.series) for at, one in zip(numbers, parts, strict=True)]
    )
    share = np.ones(len(cells))
    share[numbers] = [one.part for one in parts]
    of = np.array([row for row, _ in cells])
    some = np.zeros((count, grid.points), dtype=bool)
    np.logical_or.at(some, of, ~np.isnan(each))
    if field.parts == "same":
        joined = np.full((count, grid.points), -np.inf)
        np.maximum.at(joined, of, np.nan_to_num(each, nan=-np.inf))
    else:
        joined = np.zeros((count, grid.points))
        weight = share[:, None] if field.parts == "share" else 1.0
        np.add.at(joined, of, np.nan_to_num(each) * weight)
    return _either(whole, np.where(some, joined, np.nan))


def _whole_memory(cut: Slice, rows: _Rows, used: Floats) -> Floats | None:
    free, reserved = (_column(cut, field, rows) for field in REST_OF_MEMORY)
    if free is None:
        return None
    total = padded(used, len(free)) + free
    return total if reserved is None else total + np.nan_to_num(padded(reserved, len(total)))


def _throttled(cut: Slice, rows: _Rows) -> Floats | None:
    """Make bits of reasons from counters of the time for which clocks were held back."""
    bits: Floats | None = None
    for bit, names in THROTTLED.items():
        field = Field("throttle", tuple(Name(each, counter=True) for each in names), 1e12)
        grows = _column(cut, field, rows)
        if grows is not None:
            own = np.where(np.isnan(grows), np.nan, np.where(grows > 0, float(bit), 0.0))
            before = np.zeros((0, cut.grid.points)) if bits is None else bits
            before = padded(before, len(own))
            some = ~(np.isnan(before) & np.isnan(own))
            bits = np.where(some, np.nan_to_num(before) + np.nan_to_num(own), np.nan)
    return bits


def _either(first: Floats, other: Floats) -> Floats:
    return np.where(np.isnan(first), other, first)


def _table(cut: Slice, rows: _Rows, columns: Mapping[str, Floats]) -> pa.Table:
    keys = rows.keys
    some = np.zeros((len(keys), cut.grid.points), dtype=bool)
    # A rate is made of samples further back, and is no sign that there was one in this step.
    measured = [values for name, values in columns.items() if name not in rows.rates]
    for values in measured or columns.values():
        some |= ~np.isnan(values)
    # In the order of time, as whoever keeps them wants it.
    at, row = np.nonzero(some.T)
    nodes = pa.array([node for node, _ in keys], pa.string())
    gpus = np.array([gpu for _, gpu in keys], dtype=np.int32)
    return rows_of(
        "samples",
        {
            "cluster": pa.repeat(pa.scalar(cut.fleet.cluster), len(row)),
            "node": nodes.take(pa.array(row, pa.int64())),
            "gpu": gpus[row],
            "time_s": cut.grid.times()[at],
            **{name: values[row, at] for name, values in columns.items()},
        },
    )
