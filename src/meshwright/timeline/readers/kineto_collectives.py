"""Gives each collective's kernel what its call on the host said: kind, bytes, group, element type.

A kernel's own arguments come first. Where it has none, the call is found as the profiler meant it:
kernel, its launch by correlation, and around the launch on the same thread the innermost
`record_param_comms`. What is still unknown is read from the kernel's name, which tells the kind and
for reductions the element type.

Bytes are those of the larger of input and output, the whole buffer: what all-gather makes, what
reduce-scatter takes.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.timeline.readers.communication import (
    collective_of,
    dtype_in,
    dtype_of,
    rule_of,
    size_bytes,
)
from meshwright.timeline.readers.kineto_columns import (
    COLLECTIVE_OPERATOR,
    Codes,
    Gathered,
    Numbered,
)
from meshwright.timeline.readers.kineto_roles import Role
from meshwright.timeline.readers.kineto_times import Ints
from meshwright.timeline.schema import ABSENT

if TYPE_CHECKING:
    from meshwright.timeline.readers.kineto_spans import Columns

_NESTED = 4
"""How many calls that ended before the launch may lie between it and the one around it."""


class Communication(NamedTuple):
    """What is known of each span's communication."""

    num_bytes: Ints
    collective: tuple[Codes, list[str]]
    group: tuple[Codes, list[str]]
    dtype: tuple[Codes, list[str]]


def add_collectives(columns: "Columns", gathered: Gathered) -> Communication:
    """Find what is known of each span's communication."""
    count = columns.count
    num_bytes = np.full(count, ABSENT, dtype=np.int64)
    for rows, sizes in gathered.sizes:
        num_bytes[rows] = sizes
    kinds, groups, dtypes = Numbered(), Numbered(), Numbered()
    collective, group, dtype = (np.full(count, ABSENT, dtype=np.int32) for _ in range(3))
    known = np.zeros(count, dtype=np.bool_)
    for item in gathered.collectives:
        row = item.row
        known[row] = True
        ours = collective_of(item.name)
        if ours is not None:
            collective[row] = kinds[ours]
        if item.group is not None:
            group[row] = groups[item.group]
        if item.dtype:
            element = dtype_of(item.dtype)
            dtype[row] = dtypes[element]
            size = size_bytes(element)
            if size is not None and 0 <= item.elements < 2**56:
                num_bytes[row] = item.elements * size
    _from_calls(columns, known, (num_bytes, collective, group, dtype))
    _from_names(columns, (collective, kinds), (dtype, dtypes))
    return Communication(
        num_bytes, (collective, list(kinds)), (group, list(groups)), (dtype, list(dtypes))
    )


def _communicates(columns: "Columns") -> tuple[Ints, list[int]]:
    """Rows of kernels that communicate, and the distinct codes of their names."""
    kernels = np.flatnonzero(columns.role == Role.KERNEL)
    used = np.flatnonzero(np.bincount(columns.name[kernels], minlength=1))
    codes = [code for code in used.tolist() if rule_of(columns.names[code]) is not None]
    return kernels[np.isin(columns.name[kernels], codes)], codes


def _from_calls(columns: "Columns", known: np.ndarray, arrays: tuple[Ints | Codes, ...]) -> None:
    """Copy to kernels without arguments those of the call around their launch."""
    kernels, _ = _communicates(columns)
    kernels = kernels[~known[kernels] & (columns.flow[kernels] >= 0)]
    operator = columns.names.index(COLLECTIVE_OPERATOR)
    calls = np.flatnonzero((columns.name == operator) & known & (columns.role > Role.SYNC))
    launches = np.flatnonzero((columns.role == Role.LAUNCH) & (columns.flow >= 0))
    if not kernels.size or not calls.size or not launches.size:
        return
    order = np.argsort(columns.flow[launches], kind="stable")
    launches = launches[order]
    at = np.searchsorted(columns.flow[launches], columns.flow[kernels])
    at = np.minimum(at, len(launches) - 1)
    found = columns.flow[launches[at]] == columns.flow[kernels]
    kernels, launch = kernels[found], launches[at[found]]
    call = _around(columns, calls, launch)
    for array in arrays:
        array[kernels[call >= 0]] = array[call[call >= 0]]


def _around(columns: "Columns", calls: Ints, launches: Ints) -> Ints:
    """The innermost of the calls around each launch on its thread; -1 where there is none."""
    start, end = columns.start_ns, columns.start_ns + columns.duration_ns
    calls = calls[np.lexsort((start[calls], columns.lane[calls]))]
    # One number that sorts by thread, then time: places of the calls among all starts.
    keys = np.concatenate([calls, launches])
    order = np.lexsort((np.arange(len(keys)), start[keys], columns.lane[keys]))
    is_call = order < len(calls)
    before = np.cumsum(is_call) - 1
    last = np.empty(len(keys), dtype=np.int64)
    last[order] = before
    at = last[len(calls) :]
    found = np.full(len(launches), ABSENT, dtype=np.int64)
    for _ in range(_NESTED + 1):
        there = np.maximum(at, 0)
        call = calls[there]
        fits = (
            (found < 0)
            & (at >= 0)
            & (columns.lane[call] == columns.lane[launches])
            & (end[call] >= start[launches])
        )
        found[fits] = call[fits]
        at = at - 1
    return found


def _from_names(
    columns: "Columns", collective: tuple[Codes, Numbered], dtype: tuple[Codes, Numbered]
) -> None:
    """What the name of a kernel says, for those that nothing else is known of."""
    kernels, codes = _communicates(columns)
    for (array, numbers), read in ((collective, collective_of), (dtype, dtype_in)):
        of_name = np.full(len(columns.names), ABSENT, dtype=np.int32)
        rows = kernels[array[kernels] == ABSENT]
        for code in np.intersect1d(codes, columns.name[rows]).tolist():
            said = read(columns.names[code])
            if said is not None:
                of_name[code] = numbers[said]
        array[rows] = of_name[columns.name[rows]]
