"""`lower_to_kernel`: a collective becomes work for the kernel, step by step.

All work is of one kind, a *task*: add up the elements of some places and write the sum to some
places. A copy has one source; an add has two, one of which is its destination. Moves that a switch
adds up in one step become one task of many sources, and copies of one chunk to many places (a
multicast) one task of many destinations, so each element is read and written once. Tasks are cut
into tiles, which is what the kernel shares out. Knows no device.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.collective.collective import ChunkMoves, Collective
from meshwright.run.kernels.collective.buffer_layout import (
    ALIGN,
    BufferLayout,
    Int64Array,
    map_input_elements,
)

FIRST_TILE, ELEMENTS, SOURCE, SECOND_SOURCE, TARGET, SOURCES, TARGETS, MORE = range(8)
FIELDS = 8
"""Columns of the task table: its first tile and size; where the first two sources and the first
target begin in the buffer; how many sources and targets there are, and where in `more` those stand
that have no column."""


class KernelProgram(NamedTuple):
    """A collective as tasks, in tiles, in steps."""

    tile: int
    """Elements of a tile."""
    step_tiles: Int64Array
    """The first tile of each step, and the number of all tiles."""
    task_of_tile: NDArray[np.int32]
    tasks: Int64Array
    """One row of `FIELDS` numbers per task."""
    more: Int64Array
    """Where further sources and then further targets begin, task after task."""
    step_reads: Int64Array
    """Elements that each step reads; what comes in a second time is counted a second time."""
    step_writes: Int64Array
    """Elements that each step writes."""

    @property
    def steps(self) -> int:
        """Steps in which something moves."""
        return len(self.step_tiles) - 1

    @property
    def elements_moved(self) -> int:
        """Elements read and written in all steps together."""
        return int(self.step_reads.sum() + self.step_writes.sum())


class _Tasks(NamedTuple):
    """Tasks of one step while their cells still have numbers, place · slots + slot."""

    source_counts: Int64Array
    sources: Int64Array
    target_counts: Int64Array
    targets: Int64Array
    elements: Int64Array


def lower_to_kernel(collective: Collective, sizes: BufferLayout, *, tile: int) -> KernelProgram:
    """Return the work that a sound collective is for messages of this size."""
    slots, held = collective.slots, map_input_elements(collective, sizes)
    tables, mores, firsts = [], [], [0]
    reads, writes, tiles, more_so_far = [], [], 0, 0
    for _, moves in collective.iterate_steps():
        tasks = _joined(_step_tasks(moves.split_by_slot(), slots, held), slots, sizes.slot_elements)
        if not len(tasks.elements):
            continue
        table, more = _table(tasks, sizes.slot_elements, more_so_far)
        counts = -(-tasks.elements // tile)
        table[:, FIRST_TILE] = tiles + np.cumsum(counts) - counts
        reads.append(int((tasks.source_counts * tasks.elements).sum()))
        writes.append(int((tasks.target_counts * tasks.elements).sum()))
        tiles += int(counts.sum())
        more_so_far += len(more)
        tables.append(table)
        mores.append(more)
        firsts.append(tiles)
    rows = np.concatenate(tables) if tables else np.zeros((0, FIELDS), dtype=np.int64)
    per_task = -(-rows[:, ELEMENTS] // tile)
    return KernelProgram(
        tile=tile,
        step_tiles=np.array(firsts, dtype=np.int64),
        task_of_tile=np.repeat(np.arange(len(rows), dtype=np.int32), per_task),
        tasks=rows,
        # A table that a kernel gets must not be empty.
        more=np.concatenate([*mores, np.zeros(1, dtype=np.int64)]),
        step_reads=np.array(reads, dtype=np.int64),
        step_writes=np.array(writes, dtype=np.int64),
    )


def _step_tasks(moves: ChunkMoves, slots: int, held: Int64Array) -> _Tasks:
    """Return the tasks of one step; `held` is brought up to date."""
    sources = moves.src.astype(np.int64) * slots + moves.src_slot
    targets = moves.dst.astype(np.int64) * slots + moves.dst_slot
    elements = held[sources]
    adding = (moves.adds != 0) & (elements > 0)
    copying = (moves.adds == 0) & (elements > 0)
    sums = _sums(sources[adding], targets[adding], elements[adding], held)
    copies = _copies(sources[copying], targets[copying], elements[copying])
    held[targets] = elements
    return _Tasks(*(np.concatenate(pair) for pair in zip(sums, copies, strict=True)))


def _sums(
    sources: Int64Array, targets: Int64Array, elements: Int64Array, held: Int64Array
) -> _Tasks:
    """Everything that is added to one cell is one task, what lies there coming first.

    An empty cell of a switch counts for nothing, so that the first to arrive replaces what an
    earlier run left there.
    """
    resting = np.unique(targets[held[targets] >= 0])
    sources, targets = np.concatenate((resting, sources)), np.concatenate((resting, targets))
    elements = np.concatenate((held[resting], elements))
    order = np.argsort(targets, kind="stable")
    cells, first, counts = np.unique(targets[order], return_index=True, return_counts=True)
    ones = np.ones(len(cells), dtype=np.int64)
    return _Tasks(counts.astype(np.int64), sources[order], ones, cells, elements[order][first])


def _copies(sources: Int64Array, targets: Int64Array, elements: Int64Array) -> _Tasks:
    """Everything that is copied from one cell is one task."""
    order = np.argsort(sources, kind="stable")
    cells, first, counts = np.unique(sources[order], return_index=True, return_counts=True)
    ones = np.ones(len(cells), dtype=np.int64)
    return _Tasks(ones, cells, counts.astype(np.int64), targets[order], elements[order][first])


def _joined(tasks: _Tasks, slots: int, room: int) -> _Tasks:
    """Join tasks whose cells all follow each other without a gap; chunks are often small."""
    if len(tasks.elements) < 2:
        return tasks
    follows = (tasks.elements[:-1] == room) & (np.diff(tasks.source_counts) == 0)
    follows &= np.diff(tasks.target_counts) == 0
    follows &= _each_next(tasks.source_counts, tasks.sources, slots)
    follows &= _each_next(tasks.target_counts, tasks.targets, slots)
    heads = np.concatenate(([True], ~follows))
    return _Tasks(
        tasks.source_counts[heads],
        tasks.sources[np.repeat(heads, tasks.source_counts)],
        tasks.target_counts[heads],
        tasks.targets[np.repeat(heads, tasks.target_counts)],
        np.add.reduceat(tasks.elements, np.flatnonzero(heads)),
    )


def _each_next(counts: Int64Array, cells: Int64Array, slots: int) -> NDArray[np.bool_]:
    """Whether each cell of the next task is the one behind this task's, in the same place."""
    across = np.repeat(counts, counts)[: len(cells) - int(counts[-1])]
    here = np.arange(len(across))
    there = np.minimum(here + across, len(cells) - 1)
    behind = (cells[there] == cells[here] + 1) & (cells[there] % slots != 0)
    return np.logical_and.reduceat(behind, (np.cumsum(counts) - counts)[:-1])


def _table(tasks: _Tasks, room: int, more_before: int) -> tuple[Int64Array, Int64Array]:
    count = len(tasks.elements)
    first_source = np.cumsum(tasks.source_counts) - tasks.source_counts
    first_target = np.cumsum(tasks.target_counts) - tasks.target_counts
    has_second = tasks.source_counts > 1
    table = np.zeros((count, FIELDS), dtype=np.int64)
    # Whole groups of ALIGN elements are moved: the kernel needs no mask inside one, and what lies
    # behind a short chunk is nobody's.
    table[:, ELEMENTS] = -(-tasks.elements // ALIGN) * ALIGN
    table[:, SOURCE] = tasks.sources[first_source] * room
    table[has_second, SECOND_SOURCE] = tasks.sources[first_source[has_second] + 1] * room
    table[:, TARGET] = tasks.targets[first_target] * room
    table[:, SOURCES] = tasks.source_counts
    table[:, TARGETS] = tasks.target_counts
    more_sources = np.maximum(tasks.source_counts - 2, 0)
    more_targets = tasks.target_counts - 1
    each = more_sources + more_targets
    starts = np.cumsum(each) - each
    table[:, MORE] = more_before + starts
    more = np.zeros(int(each.sum()), dtype=np.int64)
    _fill(more, starts, more_sources, tasks.sources, first_source + 2)
    _fill(more, starts + more_sources, more_targets, tasks.targets, first_target + 1)
    return table, more * room


def _fill(
    into: Int64Array, starts: Int64Array, counts: Int64Array, values: Int64Array, firsts: Int64Array
) -> None:
    """Copy `counts` values from `firsts` on to `starts`, for each task."""
    inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    into[np.repeat(starts, counts) + inside] = values[np.repeat(firsts, counts) + inside]
