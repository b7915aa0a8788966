"""What GPUs were measured to do while a job held them, from samples rolled up over minutes.

Where it is told which GPU was whose, its own samples speak. Where only the node is told, as many of
its GPUs as were busy count as held first: the idle hours are then the fewest that are possible.
"""

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.account.inventory import NodeInventory
from meshwright.fleet.account.segments import AllocationSegments
from meshwright.fleet.account.ticks import (
    PARTS_PER_GPU,
    Flags,
    Floats,
    Ints,
    TickWindow,
    sum_rates_per_bin,
    to_ticks,
)
from meshwright.fleet.columns import combine_codes, encode_text, to_floats

IDLE_THRESHOLD: Final = 0.01
"""A GPU whose activity over a roll-up is below this did nothing."""
STARTUP_MS: Final = 15 * 60 * 1000
"""Idle time at the very beginning of an attempt is start-up for at most this long."""
_ACTIVITY = ("gpu_util_mean", "engine_active_mean", "sm_active_mean")


class ActivityRollups(NamedTuple):
    """Roll-ups of all GPUs, in order of time."""

    node: Ints
    gpu: Ints
    time_ms: Ints
    width_ms: int
    active: Floats
    """1 or 0; NaN where no activity was measured."""
    tensor: Floats


class SegmentActivity(NamedTuple):
    """What was measured during each piece, as shares of its time."""

    idle: Floats
    """The GPU did nothing."""
    startup: Floats
    """Of these, before it did anything at all."""
    covered: Floats
    """Anything is known."""
    tensor: Floats
    """Tensor activity, summed over time that it is known of."""
    tensor_known: Floats


def read_rollups(
    windows: pa.Table | None, known: NodeInventory, width_s: int = 300
) -> ActivityRollups | None:
    """Read roll-ups: rows of `width_s` seconds from `time_s`, with means of metrics."""
    if windows is None or windows.num_rows == 0:
        return None
    have = [name for name in _ACTIVITY if name in windows.column_names]
    if not have:
        return None
    cluster, node = encode_text(windows["cluster"]), encode_text(windows["node"])
    both = combine_codes(cluster.codes, node.codes, len(node.values))
    _, first, back = np.unique(both, return_index=True, return_inverse=True)
    place = np.array(
        [
            known.node_ids.get((cluster.values[cluster.codes[at]], node.values[node.codes[at]]), -1)
            if cluster.codes[at] >= 0 and node.codes[at] >= 0 else -1
            for at in first.tolist()
        ],
        np.int64,
    )[back]  # fmt: skip
    seen = np.stack([to_floats(windows[name]) for name in have])
    some = np.isfinite(seen).any(axis=0)
    busy = np.where(np.isfinite(seen), seen, 0.0).max(axis=0) >= IDLE_THRESHOLD
    tensor = (
        to_floats(windows["tensor_active_mean"])
        if "tensor_active_mean" in windows.column_names
        else np.full(windows.num_rows, np.nan)
    )
    time = to_ticks(windows["time_s"])
    gpu = pc.fill_null(windows["gpu"], -1).to_numpy().astype(np.int64)
    good = np.flatnonzero((place >= 0) & (gpu >= 0) & some)
    order = good[np.argsort(time[good], kind="stable")]
    return ActivityRollups(
        place[order], gpu[order], time[order], width_s * 1000, busy[order].astype(float),
        np.where(np.isfinite(tensor[order]), np.clip(tensor[order], 0, 1), np.nan),
    )  # fmt: skip


def measure_segments(
    found: ActivityRollups, segments: AllocationSegments, began: Ints, window: TickWindow
) -> SegmentActivity | None:
    """Measure pieces; `began` is when the attempt of each began, from the window's beginning."""
    first = window.since_ms // found.width_ms
    bins = -(-window.until_ms // found.width_ms) - first
    low, high = np.searchsorted(
        found.time_ms, (first * found.width_ms, (first + bins) * found.width_ms)
    )
    if low == high or segments.size == 0:
        return None
    part = ActivityRollups(
        found.node[low:high], found.gpu[low:high], found.time_ms[low:high], found.width_ms,
        found.active[low:high], found.tensor[low:high],
    )  # fmt: skip
    ahead = window.since_ms - first * found.width_ms
    column = part.time_ms // found.width_ms - first
    shares = SegmentActivity(*np.zeros((5, segments.size)))
    told = segments.gpu >= 0
    for mine, keyed in ((told, True), (~told & (segments.node >= 0), False)):
        if not mine.any():
            continue
        at = np.flatnonzero(mine)
        chosen = segments.select(at)
        chosen = chosen._replace(start_ms=chosen.start_ms + ahead, end_ms=chosen.end_ms + ahead)
        grid = _of_gpus(part, column, bins, chosen) if keyed else _of_nodes(
            part, column, bins, chosen
        )  # fmt: skip
        for whole, own in zip(shares, grid.over(chosen, began[at] + ahead), strict=True):
            whole[at] = own
    return shares


class _Grid(NamedTuple):
    """Per row (a GPU, or a node) and bin: shares of the held time."""

    row: Ints
    """Of each piece; -1 where nothing was measured."""
    idle: Floats
    covered: Floats
    tensor: Floats
    tensor_known: Floats
    width: int

    def over(self, segments: AllocationSegments, began: Ints) -> SegmentActivity:
        """Average over the time of each piece."""
        there = self.row >= 0
        row = np.where(there, self.row, 0)
        span = np.maximum(1, segments.end_ms - segments.start_ms).astype(float)

        def mean(values: Floats, end: Ints) -> Floats:
            summed = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
            gained = self._up_to(summed, row, end) - self._up_to(summed, row, segments.start_ms)
            return np.where(there, gained / span, 0.0)

        return SegmentActivity(
            mean(self.idle, segments.end_ms),
            mean(
                self.idle, np.clip(self._starting(row, began), segments.start_ms, segments.end_ms)
            ),
            mean(self.covered, segments.end_ms),
            mean(self.tensor, segments.end_ms),
            mean(self.tensor_known, segments.end_ms),
        )

    def _up_to(self, summed: Floats, row: Ints, time: Ints) -> Floats:
        """The integral of a row from the first bin to a moment, in ms."""
        last = summed.shape[1] - 1
        at, rest = np.divmod(time, self.width)
        at = np.clip(at, 0, last)
        after = np.minimum(at + 1, last)
        found: Floats = summed[row, at] * self.width + (summed[row, after] - summed[row, at]) * rest
        return found

    def _starting(self, row: Ints, began: Ints) -> Ints:
        """Until when an attempt was starting up: its first activity, or the most there may be.

        One that began before the window, or was never seen active, does not start up in it.
        """
        bins = self.idle.shape[1]
        active = (self.covered > 0) & (self.idle < self.covered)
        ahead = np.where(active, np.arange(bins), bins)
        following = np.minimum.accumulate(ahead[:, ::-1], axis=1)[:, ::-1]
        first = following[row, np.clip(began // self.width, 0, bins - 1)]
        until = np.minimum(first * self.width, began + STARTUP_MS)
        return np.where((began < 0) | (first >= bins), began, until)


def _of_gpus(part: ActivityRollups, column: Ints, bins: int, segments: AllocationSegments) -> _Grid:
    """Every GPU by itself."""
    size = int(max(part.gpu.max(), segments.gpu.max())) + 1
    key = part.node * size + part.gpu
    keys, row = np.unique(key, return_inverse=True)
    at = np.searchsorted(keys, segments.node * size + segments.gpu)
    at = np.minimum(at, len(keys) - 1)
    own = np.where(keys[at] == segments.node * size + segments.gpu, at, -1)
    idle, covered, tensor, known = (np.zeros((len(keys), bins)) for _ in range(4))
    idle[row, column], covered[row, column] = 1.0 - part.active, 1.0
    has = np.isfinite(part.tensor) & (part.active > 0)
    tensor[row[has], column[has]], known[row[has], column[has]] = part.tensor[has], 1.0
    return _Grid(own, idle, covered, tensor, known, part.width_ms)


def _of_nodes(
    part: ActivityRollups, column: Ints, bins: int, segments: AllocationSegments
) -> _Grid:
    """All GPUs of a node together, held against how many of them jobs have."""
    keys, row = np.unique(part.node, return_inverse=True)
    at = np.minimum(np.searchsorted(keys, segments.node), len(keys) - 1)
    there = keys[at] == segments.node
    cell, cells = row * bins + column, len(keys) * bins

    def summed(values: Floats, chosen: Flags | slice = slice(None)) -> Floats:
        found = np.bincount(cell[chosen], values[chosen], cells)
        return found.astype(np.float64).reshape(len(keys), bins)

    ones = np.ones(len(row))
    seen, busy = summed(ones), summed(part.active)
    rate = segments.part_ms / np.maximum(1, segments.end_ms - segments.start_ms) / PARTS_PER_GPU
    own = sum_rates_per_bin(
        segments.start_ms[there],
        segments.end_ms[there],
        rate[there],
        part.width_ms,
        bins,
        row=at[there],
        rows=len(keys),
    )
    # GPUs held for a part of a bin count by that part; those that were busy count as held first.
    gpus = own / part.width_ms
    judged = np.minimum(seen, gpus)
    share = np.divide(1.0, gpus, out=np.zeros_like(gpus), where=gpus > 1e-9)
    has = np.isfinite(part.tensor) & (part.active > 0)
    count = summed(ones, has)
    tensor = np.divide(
        summed(np.nan_to_num(part.tensor), has), count, out=np.zeros_like(count), where=count > 0
    )
    idle = np.clip((judged - busy) * share, 0.0, 1.0)
    covered = np.clip(judged * share, 0.0, 1.0)
    known = np.where(count > 0, covered - idle, 0.0)
    return _Grid(np.where(there, at, -1), idle, covered, tensor * known, known, part.width_ms)
