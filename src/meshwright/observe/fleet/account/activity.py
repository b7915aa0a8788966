"""What GPUs were measured to do while a job held them, from samples rolled up over minutes.

Where it is told which GPU was whose, its own samples speak. Where only the node is told, as many of
its GPUs as were busy count as held first: the idle hours are then the fewest that are possible.
"""

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.observe.fleet.account.bins import binned
from meshwright.observe.fleet.account.pieces import Pieces
from meshwright.observe.fleet.account.places import Places
from meshwright.observe.fleet.account.ticks import (
    PARTS,
    Flags,
    Floats,
    Longs,
    Window,
    joined,
    moments,
    names,
    numbers,
)

IDLE_BELOW: Final = 0.01
"""A GPU whose activity over a roll-up is below this did nothing."""
STARTUP_MS: Final = 15 * 60 * 1000
"""Idle time at the very beginning of an attempt is start-up for at most this long."""
_ACTIVITY = ("gpu_util_mean", "engine_active_mean", "sm_active_mean")


class Rolled(NamedTuple):
    """Roll-ups of all GPUs, in order of time."""

    node: Longs
    gpu: Longs
    time: Longs
    width: int
    active: Floats
    """1 or 0; NaN where no activity was measured."""
    tensor: Floats


class Measured(NamedTuple):
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


def rolled(windows: pa.Table | None, known: Places, width_s: int = 300) -> Rolled | None:
    """Read roll-ups: rows of `width_s` seconds from `time_s`, with means of metrics."""
    if windows is None or windows.num_rows == 0:
        return None
    have = [name for name in _ACTIVITY if name in windows.column_names]
    if not have:
        return None
    cluster, node = names(windows["cluster"]), names(windows["node"])
    both = joined(cluster.codes, node.codes, len(node.values))
    _, first, back = np.unique(both, return_index=True, return_inverse=True)
    place = np.array(
        [
            known.by_name.get((cluster.values[cluster.codes[at]], node.values[node.codes[at]]), -1)
            if cluster.codes[at] >= 0 and node.codes[at] >= 0 else -1
            for at in first.tolist()
        ],
        np.int64,
    )[back]  # fmt: skip
    seen = np.stack([numbers(windows[name]) for name in have])
    some = np.isfinite(seen).any(axis=0)
    busy = np.where(np.isfinite(seen), seen, 0.0).max(axis=0) >= IDLE_BELOW
    tensor = (
        numbers(windows["tensor_active_mean"])
        if "tensor_active_mean" in windows.column_names
        else np.full(windows.num_rows, np.nan)
    )
    time = moments(windows["time_s"])
    gpu = pc.fill_null(windows["gpu"], -1).to_numpy().astype(np.int64)
    good = np.flatnonzero((place >= 0) & (gpu >= 0) & some)
    order = good[np.argsort(time[good], kind="stable")]
    return Rolled(
        place[order], gpu[order], time[order], width_s * 1000, busy[order].astype(float),
        np.where(np.isfinite(tensor[order]), np.clip(tensor[order], 0, 1), np.nan),
    )  # fmt: skip


def measured(found: Rolled, held: Pieces, began: Longs, window: Window) -> Measured | None:
    """Measure pieces; `began` is when the attempt of each began, from the window's beginning."""
    first = window.since // found.width
    bins = -(-window.until // found.width) - first
    low, high = np.searchsorted(found.time, (first * found.width, (first + bins) * found.width))
    if low == high or held.size == 0:
        return None
    part = Rolled(
        found.node[low:high], found.gpu[low:high], found.time[low:high], found.width,
        found.active[low:high], found.tensor[low:high],
    )  # fmt: skip
    ahead = window.since - first * found.width
    column = part.time // found.width - first
    shares = Measured(*np.zeros((5, held.size)))
    told = held.gpu >= 0
    for mine, keyed in ((told, True), (~told & (held.node >= 0), False)):
        if not mine.any():
            continue
        at = np.flatnonzero(mine)
        chosen = held.where(at)
        chosen = chosen._replace(start=chosen.start + ahead, end=chosen.end + ahead)
        grid = _of_gpus(part, column, bins, chosen) if keyed else _of_nodes(
            part, column, bins, chosen
        )  # fmt: skip
        for whole, own in zip(shares, grid.over(chosen, began[at] + ahead), strict=True):
            whole[at] = own
    return shares


class _Grid(NamedTuple):
    """Per row (a GPU, or a node) and bin: shares of the held time."""

    row: Longs
    """Of each piece; -1 where nothing was measured."""
    idle: Floats
    covered: Floats
    tensor: Floats
    tensor_known: Floats
    width: int

    def over(self, held: Pieces, began: Longs) -> Measured:
        """Average over the time of each piece."""
        there = self.row >= 0
        row = np.where(there, self.row, 0)
        span = np.maximum(1, held.end - held.start).astype(float)

        def mean(values: Floats, end: Longs) -> Floats:
            summed = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
            gained = self._up_to(summed, row, end) - self._up_to(summed, row, held.start)
            return np.where(there, gained / span, 0.0)

        return Measured(
            mean(self.idle, held.end),
            mean(self.idle, np.clip(self._starting(row, began), held.start, held.end)),
            mean(self.covered, held.end),
            mean(self.tensor, held.end),
            mean(self.tensor_known, held.end),
        )

    def _up_to(self, summed: Floats, row: Longs, time: Longs) -> Floats:
        """The integral of a row from the first bin to a moment, in ms."""
        last = summed.shape[1] - 1
        at, rest = np.divmod(time, self.width)
        at = np.clip(at, 0, last)
        after = np.minimum(at + 1, last)
        found: Floats = summed[row, at] * self.width + (summed[row, after] - summed[row, at]) * rest
        return found

    def _starting(self, row: Longs, began: Longs) -> Longs:
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


def _of_gpus(part: Rolled, column: Longs, bins: int, held: Pieces) -> _Grid:
    """Every GPU by itself."""
    size = int(max(part.gpu.max(), held.gpu.max())) + 1
    key = part.node * size + part.gpu
    keys, row = np.unique(key, return_inverse=True)
    at = np.searchsorted(keys, held.node * size + held.gpu)
    at = np.minimum(at, len(keys) - 1)
    own = np.where(keys[at] == held.node * size + held.gpu, at, -1)
    idle, covered, tensor, known = (np.zeros((len(keys), bins)) for _ in range(4))
    idle[row, column], covered[row, column] = 1.0 - part.active, 1.0
    has = np.isfinite(part.tensor) & (part.active > 0)
    tensor[row[has], column[has]], known[row[has], column[has]] = part.tensor[has], 1.0
    return _Grid(own, idle, covered, tensor, known, part.width)


def _of_nodes(part: Rolled, column: Longs, bins: int, held: Pieces) -> _Grid:
    """All GPUs of a node together, held against how many of them jobs have."""
    keys, row = np.unique(part.node, return_inverse=True)
    at = np.minimum(np.searchsorted(keys, held.node), len(keys) - 1)
    there = keys[at] == held.node
    cell, cells = row * bins + column, len(keys) * bins

    def summed(values: Floats, chosen: Flags | slice = slice(None)) -> Floats:
        found = np.bincount(cell[chosen], values[chosen], cells)
        return found.astype(np.float64).reshape(len(keys), bins)

    ones = np.ones(len(row))
    seen, busy = summed(ones), summed(part.active)
    rate = held.amount / np.maximum(1, held.end - held.start) / PARTS
    own = binned(
        held.start[there],
        held.end[there],
        rate[there],
        part.width,
        bins,
        row=at[there],
        rows=len(keys),
    )
    # GPUs held for a part of a bin count by that part; those that were busy count as held first.
    gpus = own / part.width
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
    return _Grid(np.where(there, at, -1), idle, covered, tensor * known, known, part.width)
